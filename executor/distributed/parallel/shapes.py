"""Sizes of the memory that ranks share, for a configured model. Imports no torch."""

from __future__ import annotations

from quintet.executor.distributed.parallel.library import CRanksShape
from quintet.executor.model_config.hf_config import hf_config_of
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.share import (
    KV_GATHER_BYTES,
    LINK_DEPTH,
    PARTIAL_BYTES,
    STAGING_BYTES,
    SUM_BYTES,
    aux_layers_of,
    chosen_bytes,
    gathered_width,
    most_outputs,
    queries_width,
    results_depth,
    rotated_width,
    share_of,
    sums_width,
)
from quintet.executor.model_config.spec import DecoderSpec
from quintet.wire.config import DTYPE_BYTES, EngineConfig, ModelConfig

MAX_GATHER_ROWS = 4096
"""Limit on gathered blocks, so that a single order can name all."""


def shape_of(config: EngineConfig) -> CRanksShape:
    """Return the memory shape for the ranks of a stage."""
    scheduler, model = config.scheduler, config.model
    spec, item_bytes = spec_of(model), DTYPE_BYTES[model.dtype]
    max_tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    return CRanksShape(
        ranks=config.executor.tensor_parallel_size,
        max_tokens=max_tokens,
        max_rows=scheduler.max_num_seqs,
        max_outputs=most_outputs(scheduler),
        tables=len(model.kv.groups),
        slots=scheduler.max_num_seqs,
        table_stride=max(2, -(-(model.max_model_len + 1) // model.kv.block_size)),
        block_size=model.kv.block_size,
        sums_width=sums_width(spec),
        logits_row_bytes=model.vocab_size * config.logits_item_bytes,
        rotated_row_bytes=rotated_width(spec) * item_bytes,
        gathered_row_bytes=gathered_width(
            spec, config.executor.tensor_parallel_size, has_adapters=bool(model.adapters)
        )
        * item_bytes,
        experts_row_bytes=chosen_bytes(spec, item_bytes) if config.executor.expert_parallel else 0,
        staging_bytes=STAGING_BYTES if config.executor.eplb is not None else 0,
        depth=1,
        payload_bytes=max_tokens * spec.hidden_size * item_bytes
        if config.executor.pipeline_parallel_size > 1
        else 0,
        adapters=len(model.adapters),
        **_shared_kv_fields(config, spec, item_bytes),
    )


def _shared_kv_fields(config: EngineConfig, spec: DecoderSpec, item_bytes: int) -> dict[str, int]:
    """Return the fields for shared KV memory; sized for all layers although a stage has only some."""
    executor, kv = config.executor, config.model.kv
    if executor.decode_context_parallel_size == 1:
        return {}
    num_blocks = kv.num_blocks(config.cache.memory_bytes)
    num_bytes = num_blocks * kv.layers_per_block * kv.layer_bytes
    return {
        "kv_bytes": num_bytes,
        "kv_copies": executor.num_kv_memories,
        "query_row_bytes": queries_width(spec, share_of(executor, 0)) * item_bytes,
        "partial_floats": PARTIAL_BYTES // SUM_BYTES,
    }


def link_shape(config: EngineConfig, link: int) -> CRanksShape:
    """Return the memory shape of a link: a step's hidden states with rotations, or its logits.

    Both with hidden states that a draft head reads (`quintet.executor.distributed.parallel.pipeline`).
    """
    num_stages, shape = config.executor.pipeline_parallel_size, shape_of(config)
    shape.ranks, shape.depth = 2, LINK_DEPTH
    observed_bytes = shape.max_tokens * observed_row_bytes(config)
    shape.payload_bytes += shape.max_tokens * shape.rotated_row_bytes + observed_bytes
    shape.sums_width = shape.logits_row_bytes = shape.rotated_row_bytes = shape.gathered_row_bytes = 0
    shape.experts_row_bytes = shape.staging_bytes = shape.kv_bytes = shape.kv_copies = 0
    shape.query_row_bytes = shape.partial_floats = 0
    if link == num_stages - 1:
        shape.depth = results_depth(num_stages)
        shape.payload_bytes = shape.max_outputs * config.model.vocab_size * config.logits_item_bytes
        shape.payload_bytes += observed_bytes
    return shape


def observed_row_bytes(config: EngineConfig) -> int:
    """Return the size of a token's hidden states that a draft head reads; 0 without a head."""
    item_bytes = DTYPE_BYTES[config.model.dtype]
    return len(aux_layers_of(config.scheduler)) * spec_of(config.model).hidden_size * item_bytes


def places_of_stages(config: EngineConfig) -> list[list[int]]:
    """Return the layer positions of a block that each stage has, in memory order."""
    kv, executor = config.model.kv, config.executor
    if executor.pipeline_parallel_size == 1:
        return [sorted(kv.places_of(lambda layer: True))]
    spec = spec_of(config.model)
    firsts = range(0, executor.num_ranks, executor.tensor_parallel_size)
    return [sorted(kv.places_of(share_of(executor, rank, spec).has_layer)) for rank in firsts]


def part_bytes(config: EngineConfig) -> list[int]:
    """Return the bytes of a block in one KV memory of each stage."""
    return [len(places) * config.model.kv.layer_bytes for places in places_of_stages(config)]


def gather_rows(config: EngineConfig) -> int:
    """Return the number of rows of the gather memory, in blocks."""
    block_bytes = sum(part_bytes(config)) * config.executor.num_kv_memories
    return min(MAX_GATHER_ROWS, max(1, KV_GATHER_BYTES // block_bytes))


def gather_shape(config: EngineConfig) -> CRanksShape:
    """Return the memory shape of the gather memory, for all ranks of all stages."""
    block_bytes = sum(part_bytes(config)) * config.executor.num_kv_memories
    return CRanksShape(
        ranks=config.executor.num_ranks, depth=1, staging_bytes=gather_rows(config) * block_bytes
    )


def spec_of(model: ModelConfig) -> DecoderSpec:
    spec = FAMILIES[model.architecture].read(hf_config_of(model))
    assert isinstance(spec, DecoderSpec), model.architecture
    return spec
