"""Whether a model can be divided over ranks (``--tensor-parallel-size``), and what one of them has."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from quintet.deploy.config import rules
from quintet.deploy.config.card import ModelFacts
from quintet.deploy.config.eplb import check_copies, eplb_config, num_copied
from quintet.deploy.config.flags import Options
from quintet.deploy.config.gpu_ranks import check_gpu_ranks
from quintet.deploy.config.hosts import check_first
from quintet.deploy.config.kv_export import kv_leaves
from quintet.deploy.config.stored_ranks import why_not_stored
from quintet.executor.model_config.card import ModelCard
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
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.share import CROSSING_BYTES, Share, shared_bytes, stage_layers
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, StateSpec
from quintet.executor.model_config.state_specs import Mamba2Spec
from quintet.wire.config import DTYPE_BYTES
from quintet.wire.errors import ConfigError
from quintet.wire.json_files import parse_json
from quintet.wire.model_files import card_path

FLAG, STAGES_FLAG = "--tensor-parallel-size", "--pipeline-parallel-size"
INVARIANT_FLAG, CONTEXT_FLAG = "--layout-invariant", "--decode-context-parallel-size"
MOST_IN_KEY, MOST_IN_VALUE, TILE_TOKENS = 576, 512, 16
"""What the compiled attention takes, and ranks compute with no other: ``takes`` of ``csrc/cpu/paged.hpp``."""


def check_flags(options: Options, device: str) -> None:
    """Reject what ranks do not do."""
    size, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    eplb_config(options)
    check_first(options)
    if size == 1 and options.enable_expert_parallel:
        raise ConfigError(
            f"--enable-expert-parallel divides experts over the ranks of {FLAG}, which is 1: raise it or drop the flag"
        )
    context = options.decode_context_parallel_size
    if context > 1 and size % context:
        raise ConfigError(
            f"{CONTEXT_FLAG} {context} is of the ranks of {FLAG}, which is {size}: give a divisor of it, or drop the flag"
        )
    if context > 1 and device != "cpu":
        raise ConfigError(
            f"{CONTEXT_FLAG} {context}: ranks keep KV together in host memory so far; add --device cpu or drop it"
        )
    if options.layout_invariant and (options.executor == "mock" or device != "cpu"):
        raise ConfigError(
            f"{INVARIANT_FLAG} is of ranks, which compute real models, on the CPU so far: drop it, or add --device cpu"
        )
    if size * stages == 1:
        return
    if size * stages > MOST_RANKS:
        raise ConfigError(f"{_given(options)} is {size * stages} ranks; at most {MOST_RANKS} compute a model")
    if options.executor == "mock":
        raise ConfigError(
            f"{_given(options)}: the mock executor computes nothing that could be divided; drop one of the two"
        )
    if sys.platform != "linux":
        raise ConfigError(
            f"{_given(options)}: ranks share memory as Linux has it, and this is {sys.platform}; drop it"
        )
    if device != "cpu":
        check_gpu_ranks(options)


def of_one_rank(options: Options, facts: ModelFacts, device: str) -> ModelFacts:
    """Return what one rank keeps of every token, and which layers; reject what cannot be divided so, with numbers that fit."""
    size, path = options.tensor_parallel_size, card_path(facts.path)
    if options.pipeline_parallel_size > 1:
        facts = _cut(options, facts)
    if size == 1:
        return facts
    spec, by_experts = _spec_of(facts), options.enable_expert_parallel
    own = "only the layers of Quintet's own models are"
    reason = own if spec is None else why_not(spec, by_experts=by_experts)
    if reason is None and spec is not None and facts.stored is not None:
        reason = why_not_stored(facts.stored, spec, Share(0, size, by_experts), device)
    if spec is None or reason is not None:
        raise ConfigError(f"{FLAG} {size}: {path} cannot be divided: {reason}; drop the flag")
    if by_experts and not has_experts(spec):
        raise ConfigError(f"--enable-expert-parallel: {path} has no experts; drop the flag")
    share = Share(0, size, by_experts)
    odd = misfit(spec, share)
    if odd is not None:
        fitting = ", ".join(map(str, sizes_that_fit(spec, by_experts=by_experts))) or "none but 1"
        raise ConfigError(
            f"{FLAG} {size}: {path} has {odd}, which {size} ranks cannot share; sizes that fit: {fitting}"
        )
    if options.nnodes > 1 and options.pipeline_parallel_size == 1 and _rotates_by_length(spec):
        raise ConfigError(
            f"{FLAG} {size} --nnodes {options.nnodes}: the rotations of {path} depend on how long a prompt is, which ranks on"
            " other hosts are not told yet; drop --nnodes"
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


def sum_leaves(options: Options, facts: ModelFacts) -> int:
    """Return in how many leaves sums are added so that the number of ranks does not matter; 1 where nobody asked.

    Rejects numbers of ranks that have no whole branch each, and columns of experts.
    """
    if not options.layout_invariant:
        return 1
    size, path, spec = options.tensor_parallel_size, card_path(facts.path), _spec_of(facts)
    if spec is None:
        raise ConfigError(
            f"{INVARIANT_FLAG}: the layers of {path} are those of transformers, which no ranks divide; drop the flag"
        )
    divided = facts.stored is None or (facts.stored.name == "mxfp4" and has_experts(spec))
    leaves = leaves_of(spec) if divided else 1
    if size > 1 and has_experts(spec) and not options.enable_expert_parallel:
        raise ConfigError(
            f"{INVARIANT_FLAG}: a sum over columns of experts is another one than that of one rank, a sum over whole experts is"
            " not: add --enable-expert-parallel, or drop the flag"
        )
    if leaves % size:
        fitting = ", ".join(str(each) for each in (1, 2, 4, 8) if each <= leaves)
        raise ConfigError(
            f"{INVARIANT_FLAG} with {FLAG} {size}: sums of {path} are added as a tree of {leaves} leaves, of which each rank has"
            f" one branch; sizes that fit: {fitting}"
        )
    return leaves


def check_gpu_rows(options: Options, facts: ModelFacts, device: str, dtype_bytes: int) -> None:
    """Reject parts whose rows a GPU's kernels cannot read, 16 bytes at a time, where no others multiply."""
    size = options.tensor_parallel_size
    spec = _spec_of(facts) if device == "cuda" and size > 1 else None
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
                f"{FLAG} {size}: of {card_path(facts.path)} each rank would have rows of {odd} numbers, and a GPU's kernels read"
                f" {16 // dtype_bytes} at a time, none over: fewer ranks, or --device cpu"
            )


def _norms_parts_of_weights(state: StateSpec, size: int) -> bool:
    """Whether each rank has one group, which a kernel norms by the rank's part of the weights as it lies."""
    return isinstance(state, Mamba2Spec) and state.norm is not None and state.groups == size


def check_attention(options: Options, facts: ModelFacts, device: str, block_size: int) -> None:
    """Reject heads and blocks that only torch computes with: every rank would load its weights before it says so."""
    if device != "cpu":
        return
    if options.tensor_parallel_size * options.pipeline_parallel_size == 1 and not options.layout_invariant:
        return
    if block_size % TILE_TOKENS:
        raise ConfigError(
            f"{_given(options)} with blocks of {block_size} tokens: ranks compute with blocks of a multiple of {TILE_TOKENS};"
            " drop --block-size"
        )
    for need in facts.kv_needs:
        if need is not None and (need.key_dim > MOST_IN_KEY or need.value_dim > MOST_IN_VALUE):
            raise ConfigError(
                f"{_given(options)}: {card_path(facts.path)} has heads of {need.key_dim} numbers in keys and {need.value_dim} in"
                f" values; ranks compute with up to {MOST_IN_KEY} and {MOST_IN_VALUE}: drop the flag"
            )


def num_copied_parameters(options: Options, facts: ModelFacts) -> int:
    """Return how many numbers of experts all ranks have room for besides those of the model."""
    eplb, spec = eplb_config(options), _spec_of(facts)
    return 0 if eplb is None or spec is None else num_copied(eplb, spec)


def memory_shared(options: Options, facts: ModelFacts, device: str, item_bytes: int) -> int:
    """Return the bytes of this machine that all ranks of an engine share, at most, where the model was found to be divisible."""
    size, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    spec = _spec_of(facts) if size * stages > 1 and device == "cpu" else None
    if spec is None:
        return 0
    longest = rules.derive_max_model_len(options.max_model_len, facts.max_model_len, card_path(facts.path))
    step_tokens = rules.most_step_tokens(options, device, longest)
    eplb = eplb_config(options)
    places = 0 if eplb is None else eplb.num_redundant_experts // size
    context = options.decode_context_parallel_size
    share = Share(0, size, options.enable_expert_parallel, 0, stages, places=places, context_size=context)
    crossing = CROSSING_BYTES * kv_leaves(options)
    of_logits = DTYPE_BYTES["float32"] if options.logits_dtype == "float32" else item_bytes
    return crossing + shared_bytes(spec, share, step_tokens, options.max_num_seqs, item_bytes, of_logits)


def _cut(options: Options, facts: ModelFacts) -> ModelFacts:
    """Return which layers each stage has; reject a model whose layers cannot be in so many."""
    stages, path, spec = options.pipeline_parallel_size, card_path(facts.path), _spec_of(facts)
    if spec is None:
        raise ConfigError(
            f"{STAGES_FLAG} {stages}: {path} cannot be cut: only the layers of Quintet's own models are; drop the flag"
        )
    if len(spec.layers) < stages:
        raise ConfigError(
            f"{STAGES_FLAG} {stages}: {path} has {len(spec.layers)} layers, and each stage has at least one; sizes that fit: 1"
            f" to {len(spec.layers)}"
        )
    return dataclasses.replace(facts, stages=tuple(stage_layers(spec, stages)))


def _rotates_by_length(spec: DecoderSpec) -> bool:
    return any(rope.depends_on_length for rope in spec.ropes)


def _check_context(options: Options, spec: DecoderSpec, path: Path) -> None:
    """Reject a number of ranks that cannot keep KV together: their queries meet different KV heads."""
    size, context = options.tensor_parallel_size, options.decode_context_parallel_size
    fitting = context_sizes_that_fit(spec, size)
    if context == 1 or context in fitting:
        return
    if any(layer.state is not None for layer in spec.layers):
        raise ConfigError(
            f"{CONTEXT_FLAG} {context}: {path} has layers with states, of which each rank keeps its own; drop the flag"
        )
    sizes = ", ".join(map(str, fitting))
    reason = f"sizes that fit: {sizes}" if fitting else "no two ranks keep the same one: drop the flag"
    raise ConfigError(
        f"{CONTEXT_FLAG} {context}: ranks keep KV together whose queries meet the same KV head; with {FLAG} {size} {reason}"
    )


def _given(options: Options) -> str:
    """Return the flags that ask for ranks, as they were given."""
    sizes = ((FLAG, options.tensor_parallel_size), (STAGES_FLAG, options.pipeline_parallel_size))
    given = [f"{flag} {size}" for flag, size in sizes if size > 1]
    return " ".join(given + [INVARIANT_FLAG] * options.layout_invariant)


def _spec_of(facts: ModelFacts) -> DecoderSpec | None:
    family = FAMILIES.get(facts.architecture)
    if facts.implementation != "quintet" or family is None:
        return None
    path = card_path(facts.path)
    spec = family.read(ModelCard(parse_json(facts.card, path), str(path)))
    return spec if isinstance(spec, DecoderSpec) else None
