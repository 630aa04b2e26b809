"""Checks of tensor parallelism: on GPUs, and of quantized checkpoints as far as the configuration shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from quintet.deploy.config.device import num_gpus
from quintet.deploy.config.flags import Options
from quintet.executor.checkpoints.quant.formats.cut import why_not
from quintet.executor.checkpoints.quant.formats.scheme import Format, StoredLayer
from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.fitting import has_experts
from quintet.executor.model_config.share import KeptRange, Share
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec
from quintet.wire.errors import ConfigError

FLAG = "--tensor-parallel-size"
SIZES = (2, 4, 8)
"""Equals ``quintet.executor.backends.cuda.ops.collectives.SIZES``: all-reduce adds as a binary tree, over at most 8 GPUs with
peer access.
"""


def check_gpu_ranks(options: Options) -> None:
    """Reject unsupported ranks on GPUs. If GPUs cannot be counted here, the executor checks their number."""
    size, engines = options.tensor_parallel_size, options.data_parallel_size
    only_on_cpus = (
        ("--pipeline-parallel-size", options.pipeline_parallel_size > 1),
        ("--enable-expert-parallel", options.enable_expert_parallel),
        ("--nnodes", options.nnodes > 1),
    )
    for flag, is_set in only_on_cpus:
        if is_set:
            raise ConfigError(f"{flag} is supported on CPUs only: drop it, or add --device cpu")
    if size not in SIZES:
        raise ConfigError(f"{FLAG} is {size}; on GPUs it must be one of {', '.join(map(str, SIZES))}")
    num_visible = num_gpus(os.environ)
    if num_visible is not None and num_visible < size * engines:
        of_engines = f" with {engines} engines" if engines > 1 else ""
        raise ConfigError(
            f"{FLAG} {size}{of_engines} needs {size * engines} GPUs, one per rank, but {num_visible} are visible: lower it, or"
            " check CUDA_VISIBLE_DEVICES"
        )


DIVIDED_FORMATS = (
    *("gptq", "awq", "compressed-tensors", "squeezellm", "fp8", "fbgemm_fp8"),
    *("modelopt", "quark", "auto-round", "torchao", "gguf"),
)
"""Formats that can be sharded (`quintet.executor.checkpoints.quant.formats.cut`)."""
OF_MIXER, OF_FEED_FORWARD = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
"""Representative names of row-parallel layers, since configurations refer to names; the loader checks all others."""


def why_not_stored(stored: Format, spec: DecoderSpec, share: Share, device: str) -> str | None:
    """Return the reason why ranks cannot shard the checkpoint, or None."""
    if share.by_experts and stored.name == "mxfp4":
        return None
    if stored.name not in DIVIDED_FORMATS:
        return f"{stored.name} weights cannot be sharded; supported formats: {', '.join(DIVIDED_FORMATS)}"
    if device != "cpu":
        return f"{stored.name} weights can be sharded on CPUs only"
    if has_experts(spec) and not share.by_experts:
        return f"columns of {stored.name} experts cannot be sharded, only whole experts (add --enable-expert-parallel)"
    ranks = (replace(share, rank=rank) for rank in range(share.size))
    for name, inputs in dict.fromkeys(
        each for rank in ranks for layer in spec.layers for each in _inputs_of(layer, rank) if each[1].count
    ):
        scheme = stored.scheme(StoredLayer(name, spec.hidden_size, inputs.whole, False, None))
        reason = None if scheme is None else why_not(scheme, inputs)
        if reason is not None:
            return reason
    return None


def _inputs_of(layer: LayerSpec, share: Share) -> Iterator[tuple[str, KeptRange]]:
    """Yield a rank's input range of each row-parallel layer."""
    attention, state, mlp = layer.attention, layer.state, layer.mlp
    if isinstance(attention, AttentionSpec):
        yield OF_MIXER, share.of(attention.num_heads).times(attention.value_dim)
    if isinstance(attention, LatentSpec):
        yield OF_MIXER, share.of(attention.num_heads).times(attention.head_width)
    if state is not None:
        count = state.divided.count
        yield OF_MIXER, share.of(count).times(state.channels // count)
    width = mlp.shared_width if isinstance(mlp, ExpertsSpec) else None if mlp is None else mlp.width
    if width:
        yield OF_FEED_FORWARD, share.of(width)
