"""Whether ranks can share the layers of a checkpoint that is quantized already, as far as its configuration says."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.cards.fitting import has_experts
from quintet.executor.cards.share import Kept, Share
from quintet.executor.cards.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec
from quintet.executor.quant.formats.cut import why_not
from quintet.executor.quant.formats.scheme import Format, StoredLayer

DIVIDED_FORMATS = ("gptq", "awq", "compressed-tensors", "squeezellm")
"""Those of whose tensors each rank reads its part (`quintet.executor.quant.formats.cut`)."""
EXAMPLES = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj")
"""Names of layers whose inputs are divided: a configuration may speak of names. What others have the loader finds out."""


def why_not_stored(stored: Format, spec: DecoderSpec, share: Share, device: str) -> str | None:
    """Return why ranks cannot have such shares of a model; None if nothing is known that speaks against it."""
    if share.by_experts and stored.name == "mxfp4":
        return None
    if stored.name not in DIVIDED_FORMATS:
        return f"weights stored as {stored.name} are not divided yet, only {', '.join(DIVIDED_FORMATS)}"
    if device != "cpu":
        return f"weights stored as {stored.name} are divided on the CPU alone so far"
    if has_experts(spec):
        return f"experts stored as {stored.name} are not divided yet"
    if any(layer.state is not None for layer in spec.layers):
        return f"layers with states, stored as {stored.name}, are not divided yet"
    for rank in range(share.size):
        kept = [_inputs_of(layer, replace(share, rank=rank)) for layer in spec.layers]
        for name, inputs in dict.fromkeys((EXAMPLES[i], each[i]) for each in kept for i in range(2)):
            if inputs is None or inputs.count == 0:
                continue
            scheme = stored.scheme(StoredLayer(name, spec.hidden_size, inputs.whole, False, None))
            reason = None if scheme is None else why_not(scheme, inputs)
            if reason is not None:
                return reason
    return None


def _inputs_of(layer: LayerSpec, share: Share) -> tuple[Kept | None, Kept | None]:
    """Return which inputs of the two a rank has."""
    mixer, mlp = layer.mixer, layer.mlp
    of_heads = None
    if isinstance(mixer, AttentionSpec | LatentSpec):
        of_heads = share.of(mixer.num_heads).times(mixer.value_dim)
    return of_heads, None if mlp is None else share.of(mlp.width)
