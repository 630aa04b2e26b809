"""Check which numbers of ranks can share a model, and describe each rank's share. Imports no torch."""

from __future__ import annotations

from math import gcd

from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.share import Share
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, MlpSpec

MOST_RANKS = 64
MAX_LEAVES = 8
"""``kMostLeaves`` of ``csrc/cpu/linear/linear.hpp``."""


def misfit(spec: DecoderSpec, share: Share) -> str | None:
    """Return the reason why ranks cannot share a model like this, in a few words; None if they can."""
    return next((words for layer in spec.layers if (words := _misfit_of(layer, share)) is not None), None)


def why_not(spec: DecoderSpec, *, by_experts: bool) -> str | None:
    """Return the reason why no number of ranks can share a model; None if some number can."""
    if not by_experts and any(isinstance(each.mlp, ExpertsSpec) and each.mlp.biased for each in spec.layers):
        return "columns of biased experts cannot be divided, but whole experts can: add --enable-expert-parallel, or"
    return None


def sizes_that_fit(spec: DecoderSpec, *, by_experts: bool) -> list[int]:
    """Return the numbers of ranks, from 2, that can share a model."""
    shares = (Share(0, size, by_experts) for size in range(2, MOST_RANKS + 1))
    return [share.size for share in shares if misfit(spec, share) is None]


def context_sizes_that_fit(spec: DecoderSpec, size: int) -> list[int]:
    """Return the context-parallel sizes, from 2, for ``size`` ranks: ranks of one KV head share its KV memory."""
    if any(layer.state is not None for layer in spec.layers):
        return []  # states are not shared between ranks
    heads = [layer.attention.num_kv_heads for layer in spec.layers if layer.attention is not None]
    group_size = gcd(*(size // count if count < size else 1 for count in heads))
    return [fitting for fitting in range(2, group_size + 1) if group_size % fitting == 0]


def leaves_of(spec: DecoderSpec) -> int:
    """Return the number of leaves of the summation tree that makes results independent of the number of ranks.

    It is the largest of 8, 4 and 2 ranks that can share the model, or 1. Ranks then have whole experts, because
    partial sums over an expert's columns would change the order of additions.
    """
    by_experts = has_experts(spec)
    if why_not(spec, by_experts=by_experts) is not None:
        return 1
    fitting = {1, *sizes_that_fit(spec, by_experts=by_experts)}
    return max(leaves for leaves in (1, 2, 4, MAX_LEAVES) if leaves in fitting)


def has_experts(spec: DecoderSpec) -> bool:
    """Return whether a layer has experts."""
    return any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers)


def describe_share(spec: DecoderSpec, share: Share) -> list[str]:
    """Describe a rank's share of the model: distinct kinds of layers in model order."""
    size, parts = share.size, []
    for layer in spec.layers:
        attention, state, mlp = layer.attention, layer.state, layer.mlp
        if isinstance(attention, AttentionSpec):
            heads, kv_heads = attention.num_heads, attention.num_kv_heads
            mine = share.of_kv_heads(kv_heads).count
            parts.append(f"{heads // size} of {heads} heads with {mine} of {kv_heads} KV heads")
        if isinstance(attention, LatentSpec):
            parts.append(f"{attention.num_heads // size} of {attention.num_heads} heads over all latents")
        if state is not None:
            divided = state.divided
            parts.append(f"{divided.count // size} of {divided.count} {divided.name}")
        if isinstance(mlp, MlpSpec):
            parts.append(f"{mlp.width // size} of {mlp.width} columns of feed-forwards")
        if isinstance(mlp, ExpertsSpec):
            count, width = mlp.routing.experts, mlp.width
            of_each = f"{width // size} of {width} columns of each of {count} experts"
            whole = f"{share.of_experts(count).count} of {count} experts"
            whole += f" and slots for copies of {share.places}" if share.places else ""
            parts.append(whole if share.by_experts else of_each)
    return [*dict.fromkeys(parts), f"{-(-spec.vocab_size // size)} of {spec.vocab_size} logits"]


def _misfit_of(layer: LayerSpec, share: Share) -> str | None:
    attention, state, mlp, size = layer.attention, layer.state, layer.mlp, share.size
    if attention is not None:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        if heads % size:
            return f"{heads} heads"
        if kv_heads % size and size % kv_heads:
            return f"{kv_heads} KV heads"
    if state is not None:
        divided = state.divided
        if divided.count % size:
            return f"{divided.count} {divided.name}"
        if divided.groups % size and size % divided.groups:
            return f"{divided.groups} groups of {divided.name}"
    if isinstance(mlp, ExpertsSpec):
        if share.by_experts and mlp.routing.experts < size:
            return f"{mlp.routing.experts} experts"
        widths = (0 if share.by_experts else mlp.width, mlp.shared_width or 0)
        width = next((width for width in widths if width % size), None)
        return None if width is None else f"experts {width} wide"
    if mlp is not None and mlp.width % size:
        return f"feed-forwards {mlp.width} wide"
    return None
