"""Command R and A: parallel attention and feed-forward after one norm without bias, interleaved rotation."""

from __future__ import annotations

from dataclasses import replace

from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.rope import MAX_POSITIONS
from quintet.executor.model_config.shape import (
    SLIDING,
    attention,
    decoder,
    every_full,
    gated,
    layer_kinds,
    layer_norm,
    num_layers,
    rotated_reach,
    side_by_side,
    window,
)
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, QkNormOver


def cohere(hf_config: HfConfig) -> DecoderSpec:
    """Command R; R+ norms queries and keys with separate weights per head."""
    norm = layer_norm(hf_config, biased=False)
    normed = hf_config.flag("use_qk_norm", False)
    mixer = attention(
        hf_config,
        positions=8192,
        theta=500000.0,
        interleaved=True,
        bias_key="attention_bias",
        qk_norm=norm if normed else None,
        qk_norm_over=QkNormOver.OWN,
    )
    return _decoder(hf_config, (mixer,) * num_layers(hf_config))


def cohere2(hf_config: HfConfig) -> DecoderSpec:
    """Command R7B and A: three of four layers have a sliding window and rotation; the others have neither."""
    mixer = attention(hf_config, positions=8192, interleaved=True, bias_key="attention_bias")
    sliding, full = replace(mixer, window=window(hf_config, 4096)), replace(mixer, rope=None)
    kinds = layer_kinds(
        hf_config, every_full(hf_config, hf_config.whole("sliding_window_pattern", 1, 1024, 4))
    )
    return _decoder(hf_config, tuple(sliding if kind == SLIDING else full for kind in kinds))


def _decoder(hf_config: HfConfig, mixers: tuple[AttentionSpec, ...]) -> DecoderSpec:
    """Build the decoder; a config's ``model_max_length``, if present, is the final context length."""
    norm, mlp = layer_norm(hf_config, biased=False), gated(hf_config)
    reach = rotated_reach(hf_config, [mixer.rope for mixer in mixers])
    return decoder(
        hf_config,
        tuple(side_by_side(norm, mixer, mlp) for mixer in mixers),
        norm,
        usually_tied=True,
        reach=hf_config.whole("model_max_length", 1, MAX_POSITIONS, reach),
        logit_scale=hf_config.real("logit_scale", 1e-6, 1e6, 0.0625),
    )


FAMILIES = {
    "CohereForCausalLM": Family(cohere, "Command R and R+, Aya"),
    "Cohere2ForCausalLM": Family(cohere2, "Command R7B and A"),
}
