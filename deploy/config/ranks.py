"""Validation of tensor and pipeline parallelism, and the share of one rank."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from quintet.deploy.config import rules
from quintet.deploy.config.device import num_gpus
from quintet.deploy.config.eplb import check_copies, eplb_config, num_copied
from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import check_first
from quintet.deploy.config.kv.transfer import leaves_executor
from quintet.deploy.config.model.hf_config import ModelFacts
from quintet.executor.checkpoints.quant.formats.cut import why_not as why_not_cut
from quintet.executor.checkpoints.quant.formats.scheme import Format, StoredLayer
from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.fitting import (
    MOST_RANKS,
    context_sizes_that_fit,
    has_experts,
    leaves_of,
    misfit,
    sizes_that_fit,
    why_not,
)
from quintet.executor.model_config.share import KV_GATHER_BYTES, KeptRange, Share, shared_bytes, stage_layers
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, StateSpec
from quintet.executor.model_config.state_specs import Mamba2Spec
from quintet.wire.config import DTYPE_BYTES
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import hf_config_path

FLAG, STAGES_FLAG = "--tensor-parallel-size", "--pipeline-parallel-size"
INVARIANT_FLAG, CONTEXT_FLAG = "--layout-invariant", "--decode-context-parallel-size"
MOST_IN_KEY, MOST_IN_VALUE, TILE_TOKENS = 576, 512, 16
"""Limits of the CPU attention kernel, the only one that ranks use: ``takes`` of ``csrc/cpu/attention/paged.hpp``."""

SIZES = (2, 4, 8)
"""Equals ``quintet.executor.backends.cuda.ops.collectives.SIZES``: all-reduce adds as a binary tree, over at most 8 GPUs with
peer access.
"""
DIVIDED_FORMATS = (
    *("gptq", "awq", "compressed-tensors", "squeezellm", "fp8", "fbgemm_fp8"),
    *("modelopt", "quark", "auto-round", "torchao", "gguf"),
)
"""Formats that can be sharded (`quintet.executor.checkpoints.quant.formats.cut`)."""
OF_MIXER, OF_FEED_FORWARD = "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
"""Representative names of row-parallel layers, since configurations refer to names; the loader checks all others."""
_UNKNOWN_LAYERS = "Quintet does not implement its layers"


def check_flags(options: Options, device: str) -> None:
    """Validate the parallelism flags. Raises `ConfigError`."""
    size, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    eplb_config(options)
    check_first(options)
    if size == 1 and options.enable_expert_parallel:
        raise ConfigError(
            f"--enable-expert-parallel requires {FLAG} above 1: raise it, or drop --enable-expert-parallel"
        )
    context = options.decode_context_parallel_size
    if context > 1 and size % context:
        raise ConfigError(f"{CONTEXT_FLAG} is {context}; it must divide {FLAG} {size}")
    if options.layout_invariant and (options.executor == "mock" or device != "cpu"):
        raise ConfigError(
            f"{INVARIANT_FLAG} is supported on CPUs only, and not by the mock executor: drop it, or add --device cpu"
        )
    if size * stages == 1:
        return
    if size * stages > MOST_RANKS:
        raise ConfigError(
            f"{_given(options)} gives {size * stages} ranks; a model can have at most {MOST_RANKS}"
        )
    if options.executor == "mock":
        raise ConfigError(f"{_given(options)}: the mock executor does not support ranks; drop one of the two")
    if sys.platform != "linux":
        raise ConfigError(
            f"{_given(options)}: ranks require Linux, but this is {sys.platform}; drop the flag"
        )
    if device != "cpu":
        _check_gpu_ranks(options)


def _check_gpu_ranks(options: Options) -> None:
    """Reject unsupported ranks on GPUs. If GPUs cannot be counted here, the executor checks their number."""
    size, engines = options.tensor_parallel_size, options.data_parallel_size
    if size not in SIZES:
        raise ConfigError(f"{FLAG} is {size}; on GPUs it must be one of {', '.join(map(str, SIZES))}")
    num_visible = num_gpus(os.environ)
    if num_visible is not None and num_visible < size * engines:
        of_engines = f" with {engines} engines" if engines > 1 else ""
        raise ConfigError(
            f"{FLAG} {size}{of_engines} needs {size * engines} GPUs, one per rank, but {num_visible} are visible: lower it, or"
            " check CUDA_VISIBLE_DEVICES"
        )


def of_one_rank(options: Options, facts: ModelFacts, device: str) -> ModelFacts:
    """Return the facts with KV, states and layers of one rank. Raises `ConfigError` with valid sizes."""
    size, path = options.tensor_parallel_size, hf_config_path(facts.path)
    if options.pipeline_parallel_size > 1:
        facts = _with_stages(options, facts)
    if size == 1:
        return facts
    spec, by_experts = facts.decoder, options.enable_expert_parallel
    reason = _UNKNOWN_LAYERS if spec is None else why_not(spec, by_experts=by_experts)
    if reason is None and spec is not None and facts.stored is not None:
        reason = _why_not_stored(facts.stored, spec, Share(0, size, by_experts), device)
    if spec is None or reason is not None:
        raise ConfigError(f"{FLAG} {size}: {path} cannot be sharded: {reason}; drop the flag")
    if by_experts and not has_experts(spec):
        raise ConfigError(f"--enable-expert-parallel: {path} has no experts; drop the flag")
    share = Share(0, size, by_experts)
    odd = misfit(spec, share)
    if odd is not None:
        fitting = ", ".join(map(str, sizes_that_fit(spec, by_experts=by_experts))) or "none but 1"
        raise ConfigError(
            f"{FLAG} {size}: {path} has {odd}, which cannot be sharded over {size} ranks; valid sizes: {fitting}"
        )
    rotates_by_length = any(rope.depends_on_length for rope in spec.ropes)
    if options.nnodes > 1 and options.pipeline_parallel_size == 1 and rotates_by_length:
        raise ConfigError(
            f"{FLAG} {size} --nnodes {options.nnodes}: RoPE of {path} depends on the prompt length, which is not supported on"
            " several hosts; drop --nnodes"
        )
    _check_context(options, spec, path)
    eplb = eplb_config(options)
    if eplb is not None:
        check_copies(eplb, spec, share)
    needs = (
        None
        if need is None
        else dataclasses.replace(need, num_kv_heads=share.of_kv_heads(need.num_kv_heads).count)
        for need in facts.kv_needs
    )
    states = tuple(share.of_state_need(layer) for layer in spec.layers)
    return dataclasses.replace(facts, kv_needs=tuple(needs), state_needs=states)


def _why_not_stored(stored: Format, spec: DecoderSpec, share: Share, device: str) -> str | None:
    """Return the reason why ranks cannot shard the checkpoint, or None."""
    if share.by_experts and stored.name == "mxfp4":
        return None
    if stored.name not in DIVIDED_FORMATS:
        return f"{stored.name} weights cannot be sharded; supported formats: {', '.join(DIVIDED_FORMATS)}"
    if device != "cpu":
        return f"{stored.name} weights can be sharded on CPUs only"
    if has_experts(spec) and not share.by_experts:
        return f"columns of {stored.name} experts cannot be sharded, only whole experts (add --enable-expert-parallel)"
    ranks = (dataclasses.replace(share, rank=rank) for rank in range(share.size))
    for name, inputs in dict.fromkeys(
        each for rank in ranks for layer in spec.layers for each in _inputs_of(layer, rank) if each[1].count
    ):
        scheme = stored.scheme(StoredLayer(name, spec.hidden_size, inputs.whole, False, None))
        reason = None if scheme is None else why_not_cut(scheme, inputs)
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


def sum_leaves(options: Options, facts: ModelFacts) -> int:
    """Return the number of leaves of the binary tree of sums for ``--layout-invariant``; 1 without the flag.

    Raises `ConfigError` for sharded columns of experts, and for ranks that do not divide the tree into branches.
    """
    if not options.layout_invariant:
        return 1
    size, path, spec = options.tensor_parallel_size, hf_config_path(facts.path), facts.decoder
    if spec is None:
        raise ConfigError(
            f"{INVARIANT_FLAG}: {path} uses transformers, which does not support ranks; drop the flag"
        )
    divided = facts.stored is None or (facts.stored.name == "mxfp4" and has_experts(spec))
    leaves = leaves_of(spec) if divided else 1
    if size > 1 and has_experts(spec) and not options.enable_expert_parallel:
        raise ConfigError(
            f"{INVARIANT_FLAG}: sharding columns of experts changes the order of sums: add --enable-expert-parallel, or drop the"
            " flag"
        )
    if leaves % size:
        fitting = ", ".join(str(each) for each in (1, 2, 4, 8) if each <= leaves)
        raise ConfigError(
            f"{INVARIANT_FLAG} with {FLAG} {size}: sums of {path} form a tree of {leaves} leaves, one branch per rank; valid"
            f" sizes: {fitting}"
        )
    return leaves


def check_gpu_rows(options: Options, facts: ModelFacts, device: str, dtype_bytes: int) -> None:
    """Reject shards with rows that are not multiples of 16 bytes, where the only kernels require this."""
    size = options.tensor_parallel_size
    spec = facts.decoder if device == "cuda" and size > 1 else None
    for layer in () if spec is None else spec.layers:
        attention, state, mlp, depths = layer.attention, layer.state, layer.mlp, []
        if isinstance(mlp, ExpertsSpec) or (mlp is not None and options.batch_invariant):
            depths.append(mlp.width // size)
        if isinstance(attention, AttentionSpec) and options.batch_invariant:
            depths.append(attention.num_heads // size * attention.value_dim)
        if state is not None and (options.batch_invariant or _norms_parts_of_weights(state, size)):
            depths.append(state.channels // size)
        odd = next((depth for depth in depths if depth * dtype_bytes % 16), None)
        if odd is not None:
            raise ConfigError(
                f"{FLAG} {size}: each rank of {hf_config_path(facts.path)} would have rows of {odd} numbers, but GPU kernels"
                f" require multiples of {16 // dtype_bytes}: use fewer ranks, or --device cpu"
            )


def _norms_parts_of_weights(state: StateSpec, size: int) -> bool:
    """Return whether each rank has one norm group, with weights that a kernel reads in place."""
    return isinstance(state, Mamba2Spec) and state.norm is not None and state.groups == size


def check_attention(options: Options, facts: ModelFacts, device: str, block_size: int) -> None:
    """Reject block and head sizes that only torch supports, before ranks load their weights."""
    if device != "cpu":
        return
    if options.tensor_parallel_size * options.pipeline_parallel_size == 1 and not options.layout_invariant:
        return
    if block_size % TILE_TOKENS:
        raise ConfigError(
            f"{_given(options)} requires a block size that is a multiple of {TILE_TOKENS}, but it is {block_size}; drop"
            " --block-size"
        )
    for need in facts.kv_needs:
        if need is not None and (need.key_dim > MOST_IN_KEY or need.value_dim > MOST_IN_VALUE):
            raise ConfigError(
                f"{_given(options)}: {hf_config_path(facts.path)} has heads with key width {need.key_dim} and value width"
                f" {need.value_dim}; the maxima for ranks are {MOST_IN_KEY} and {MOST_IN_VALUE}: drop the flag"
            )


def num_copied_parameters(options: Options, facts: ModelFacts) -> int:
    """Return the number of parameters of redundant experts, over all ranks."""
    eplb, spec = eplb_config(options), facts.decoder
    return 0 if eplb is None or spec is None else num_copied(eplb, spec)


def memory_shared(
    options: Options, facts: ModelFacts, device: str, item_bytes: int, num_observed: int
) -> int:
    """Return the maximum shared memory of an engine's ranks, in bytes. num_observed: hidden states that a draft head reads."""
    size, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    spec = facts.decoder if size * stages > 1 and device == "cpu" else None
    if spec is None:
        return 0
    longest = rules.derive_max_model_len(options.max_model_len, facts.spec.reach, hf_config_path(facts.path))
    step_tokens = rules.most_step_tokens(options, device, longest)
    eplb = eplb_config(options)
    places = 0 if eplb is None else eplb.num_redundant_experts // size
    context = options.decode_context_parallel_size
    share = Share(
        *(0, size, options.enable_expert_parallel, 0, stages),
        places=places,
        context_size=context,
        has_adapters=bool(options.lora_modules),
    )
    crossing = KV_GATHER_BYTES * leaves_executor(options)
    of_logits = DTYPE_BYTES["float32"] if options.logits_dtype == "float32" else item_bytes
    limits = step_tokens, options.max_num_seqs
    return crossing + shared_bytes(spec, share, *limits, item_bytes, of_logits, num_observed)


def _with_stages(options: Options, facts: ModelFacts) -> ModelFacts:
    """Return the facts with the layers of each stage. Raises `ConfigError` for too many stages."""
    stages, path, spec = options.pipeline_parallel_size, hf_config_path(facts.path), facts.decoder
    if spec is None:
        raise ConfigError(
            f"{STAGES_FLAG} {stages}: {path} cannot be divided into stages: {_UNKNOWN_LAYERS}; drop the flag"
        )
    if len(spec.layers) < stages:
        raise ConfigError(
            f"{STAGES_FLAG} {stages}: {path} has {len(spec.layers)} layers, and each stage needs one; valid sizes: 1 to"
            f" {len(spec.layers)}"
        )
    return dataclasses.replace(facts, stages=tuple(stage_layers(spec, stages)))


def _check_context(options: Options, spec: DecoderSpec, path: Path) -> None:
    """Reject a context-parallel size where ranks use different KV heads."""
    size, context = options.tensor_parallel_size, options.decode_context_parallel_size
    fitting = context_sizes_that_fit(spec, size)
    if context == 1 or context in fitting:
        return
    if any(layer.state is not None for layer in spec.layers):
        raise ConfigError(
            f"{CONTEXT_FLAG} {context}: {path} has recurrent states, which ranks cannot share; drop the flag"
        )
    sizes = ", ".join(map(str, fitting))
    reason = f"valid sizes: {sizes}" if fitting else "no two ranks share a KV head, so drop the flag"
    raise ConfigError(
        f"{CONTEXT_FLAG} {context}: only ranks with the same KV heads can share a KV cache; with {FLAG} {size}, {reason}"
    )


def _given(options: Options) -> str:
    """Return the flags that enable ranks, with their values."""
    sizes = ((FLAG, options.tensor_parallel_size), (STAGES_FLAG, options.pipeline_parallel_size))
    given = [f"{flag} {size}" for flag, size in sizes if size > 1]
    return " ".join(given + [INVARIANT_FLAG] * options.layout_invariant)
