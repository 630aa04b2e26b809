"""Describe a decoder in words, for `quintet plan` and the table of ``docs/models.md``."""

from __future__ import annotations

from collections.abc import Iterable

from quintet.executor.model_config.experts import ExpertsLayout, ExpertsSpec
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    MixerSpec,
    MlpLayout,
    MlpSpec,
    NormKind,
    ParallelMixerSpec,
    QkvLayout,
)
from quintet.executor.model_config.state_specs import DeltaSpec, Mamba2Spec, MambaSpec, ShortConvSpec

_LAYOUTS = {
    QkvLayout.SEPARATE: "",
    QkvLayout.STACKED: "q, k, v stacked in one tensor",
    QkvLayout.GROUPED: "q, k, v stacked head by head",
    QkvLayout.QUARTERS: "q, v, k stacked in 4 parts",
}
_MIXERS: dict[type, str] = {
    MambaSpec: "Mamba",
    Mamba2Spec: "Mamba 2",
    ShortConvSpec: "short convolution",
    DeltaSpec: "gated delta rule",
}
_KINDS = {NormKind.RMS: "RMS", NormKind.LAYER: "layer"}


def describe(spec: DecoderSpec) -> dict[str, str]:
    """Return descriptions of a decoder's norms, positions, mixers, feed-forward layers and other features."""
    layers = spec.layers
    mixers = [each for each in spec.attentions if isinstance(each, AttentionSpec)]
    return {
        "norms": _each(_norms(layer) for layer in layers),
        "positions": _positions(spec, mixers),
        "mixer": _each(_mixer(layer.mixer) for layer in layers),
        "feed-forward": _each(_feed_forward(layer) for layer in layers),
        "other": _rest(spec),
    }


def _each(words: Iterable[str]) -> str:
    """Join the distinct descriptions of all layers with slashes."""
    return " / ".join(each for each in dict.fromkeys(words) if each)


def _joined(*words: str | bool | None) -> str:
    return ", ".join(word for word in words if isinstance(word, str) and word)


def _in_parentheses(*words: str | bool | None) -> str:
    """Return the words in parentheses, to append to a description; an empty string without words."""
    joined = _joined(*words)
    return f" ({joined})" if joined else ""


def _norms(layer: LayerSpec) -> str:
    norms = (layer.mixer_norms, layer.mlp_norms)
    kinds = [
        norm.kind for each in norms for norm in (each.before, each.after, each.of_sum) if norm is not None
    ]
    first = layer.mixer_norms
    places = [
        word
        for word, norm in (("before", first.before), ("after", first.after), ("of the sum", first.of_sum))
        if norm is not None
    ]
    kind = _each(_KINDS[kind] for kind in kinds)
    side = "side by side" + ("" if layer.mlp_norms.before else ", one norm") if layer.parallel else ""
    return _joined(f"{kind} {' and '.join(places)}" if kinds else "none", side)


def _positions(spec: DecoderSpec, mixers: list[AttentionSpec]) -> str:
    words = ["sinusoids" if spec.positions.sinusoidal else "learned"] if spec.positions is not None else []
    for mixer in mixers:
        if mixer.alibi:
            words.append("ALiBi")
        elif mixer.rope is not None:
            share = mixer.rope.rotary_dim / mixer.head_dim
            words.append(
                "rotated"
                + _in_parentheses(share < 1 and f"{share:g} of a head", mixer.interleaved and "interleaved")
            )
        elif spec.positions is None:
            words.append("none")
    for layer in spec.layers:
        if isinstance(layer.mixer, LatentSpec):
            share = layer.mixer.rope_dim / (layer.mixer.rope_dim + layer.mixer.plain_dim)
            words.append(
                "rotated"
                + _in_parentheses(f"{share:.2g} of a head", layer.mixer.interleaved and "interleaved")
            )
    several = f"{len(spec.ropes)} rotations" if len(spec.ropes) > 1 else ""
    return _joined(_each(words), several)


def _mixer(mixer: MixerSpec | None) -> str:
    if mixer is None:
        return ""
    if isinstance(mixer, LatentSpec):
        return "latent attention" + _in_parentheses(mixer.q_rank is not None and "of queries, too")
    if isinstance(mixer, ParallelMixerSpec):
        return f"{_mixer(mixer.attention)} in parallel with {_mixer(mixer.state)}"
    if not isinstance(mixer, AttentionSpec):
        return _MIXERS[type(mixer)]
    biases = {(True, True): "biases", (True, False): "qkv biases", (False, True): "output bias"}
    return "attention" + _in_parentheses(
        biases.get((mixer.qkv_bias, mixer.output_bias)),
        mixer.qk_norm is not None
        and f"{_KINDS[mixer.qk_norm.kind]} norm of q, k ({mixer.qk_norm_over.value})"
        + (" after rotation" if mixer.qk_norm_after_rope else ""),
        mixer.attended_norm is not None and f"{_KINDS[mixer.attended_norm.kind]} output norm",
        mixer.window is not None and "window",
        mixer.chunk is not None and "chunks",
        mixer.softcap is not None and "soft cap",
        mixer.sinks and "sinks",
        mixer.clip_qkv is not None and "q, k, v clipped",
        mixer.output_gate and "gated",
        _LAYOUTS[mixer.layout],
    )


def _feed_forward(layer: LayerSpec) -> str:
    match layer.mlp:
        case None:
            return ""
        case MlpSpec() as mlp:
            kind = f"{'gated' if mlp.gated else 'plain'} {mlp.activation.value.replace('_', ' ')}"
            return kind + _in_parentheses(
                mlp.biased and "biases",
                mlp.layout is MlpLayout.STACKED and "gate, up stacked",
                mlp.down_norm is not None and f"{_KINDS[mlp.down_norm.kind]} inner norm",
            )
        case ExpertsSpec() as experts:
            routing = experts.routing
            return f"{routing.chosen} of {routing.experts} experts" + _in_parentheses(
                experts.shared_width is not None and "and a shared one",
                experts.clamp is not None and "clamped",
                experts.layout is ExpertsLayout.MXFP4 and "MXFP4",
            )


def _rest(spec: DecoderSpec) -> str:
    return _joined(
        spec.tied and "tied",
        spec.transposed and "matrices transposed",
        spec.embedding_norm is not None and "embedding normed",
        spec.embedding_scale != 1.0 and "embedding scaled",
        spec.embedding_width is not None and "embedding projected",
        any(layer.residual_multiplier != 1.0 for layer in spec.layers) and "residuals scaled",
        spec.head_bias and "output bias",
        spec.logit_scale != 1.0 and "logits scaled",
        spec.logit_softcap is not None and "logits capped",
    )
