"""KV tiers and speculative decoding in the output of `quintet plan`: disk, store and transfer of KV, draft model, states."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quintet.deploy.config.kv.storage import free_bytes
from quintet.deploy.config.memory import format_size
from quintet.executor.model_config.state_specs import (
    STATES_PER_REQUEST,
    num_draft_model_states,
    num_draft_states,
)
from quintet.executor.speculation.gram_index import grams_of, index_bytes
from quintet.executor.speculation.output_cache import CACHED_TOKEN_BYTES
from quintet.wire.config import EngineConfig, KvPeersConfig, KvStoreConfig

Rows = list[tuple[str, str]]


class KvDiskPlan(msgspec.Struct, frozen=True):
    """Disk KV cache of each engine."""

    folder: str
    size_bytes: int
    num_blocks: int
    staging_bytes: int
    """Maximum host memory for reading blocks."""
    free_bytes: int
    """Free disk space."""


def disk_plan(config: EngineConfig) -> KvDiskPlan | None:
    """Return the plan of the disk KV cache, or None."""
    disk = config.cache.disk
    if disk is None:
        return None
    num_blocks = config.model.kv.num_offloaded_blocks(disk.size_bytes)
    free = free_bytes(Path(disk.folder))
    parts = config.cache.num_parts
    return KvDiskPlan(disk.folder, disk.size_bytes * parts, num_blocks, disk.staging_bytes * parts, free)


def store_plan(config: EngineConfig) -> KvStoreConfig | None:
    """Return the KV store section with memory summed over ranks, or None."""
    store, parts = config.cache.store, config.cache.num_parts
    if store is None:
        return None
    return msgspec.structs.replace(store, staging_bytes=store.staging_bytes * parts)


def peers_plan(config: EngineConfig) -> KvPeersConfig | None:
    """Return the KV transfer section with memory summed over ranks, or None."""
    peers, parts = config.cache.peers, config.cache.num_parts
    if peers is None:
        return None
    staging_bytes, offered_bytes = peers.staging_bytes * parts, peers.offered_bytes * parts
    return msgspec.structs.replace(peers, staging_bytes=staging_bytes, offered_bytes=offered_bytes)


def rows_of(
    disk: KvDiskPlan | None, store: KvStoreConfig | None, peers: KvPeersConfig | None, block_size: int
) -> Rows:
    """Return text rows: label, value."""
    rows: Rows = []
    if disk is not None:
        words = (
            f"{format_size(disk.size_bytes)} in {disk.folder}: {disk.num_blocks:,} blocks of {block_size} tokens, per"
            f" engine; {format_size(disk.free_bytes)} free on disk; {format_size(disk.staging_bytes)} of read buffers"
        )
        rows.append(("KV on disk", words))
    if store is not None:
        size = format_size(store.size_bytes)
        bound = f"{size} for all servers" if store.size_bytes else "size limited by the storage"
        memory = format_size(store.staging_bytes + store.waiting_bytes)
        rows.append(("KV store", f"{store.url}, {bound}; {memory} of memory per engine"))
    if peers is not None:
        words = peers.role
        if peers.listen:
            words += (
                f"; offered at {peers.listen}, in {format_size(peers.offered_bytes)} of memory per engine"
            )
        if peers.allowed:
            words += f"; fetched from {', '.join(peers.allowed)} into {format_size(peers.staging_bytes)}"
        rows.append(("KV transfer", words))
    return rows


class DraftPlan(msgspec.Struct, frozen=True):
    """Draft model of speculative decoding. `quintet.deploy.cli.plan.Plan.kv_bytes_per_token` includes its keys and values."""

    model: str
    architecture: str
    dtype: str
    quantization: str
    weight_bytes: int
    kv_bytes_per_token: int
    """Keys and values, and features of a head."""
    max_model_len: int
    state_bytes: int
    """Maximum memory of its recurrent states, in addition to KV memory; 0 without such layers."""


def draft_plan(config: EngineConfig) -> DraftPlan | None:
    """Return the draft model's part of the plan, or None without one."""
    speculative = config.scheduler.speculative
    draft = None if speculative is None else speculative.draft
    if draft is None:
        return None
    model, served = draft.model, config.model.kv
    state_bytes = 0
    if draft.states is not None:
        num_blocks = served.num_blocks(config.cache.memory_bytes)
        num_requests = num_draft_model_states(config.scheduler, served, num_blocks)
        state_bytes = num_requests * STATES_PER_REQUEST * draft.states.bytes_per_block
    block_bytes = served.draft_bytes * config.executor.tensor_parallel_size
    return DraftPlan(
        *(model.served_names[0], model.architecture, model.dtype, draft.quantization, draft.weight_bytes),
        *(block_bytes // served.block_size, model.max_model_len, state_bytes),
    )


def draft_state_bytes(config: EngineConfig) -> int:
    """Return the memory of the recurrent states that are saved before drafts; 0 without drafts or states."""
    kv = config.model.kv
    num_states = num_draft_states(config.scheduler, kv, kv.num_blocks(config.cache.memory_bytes))
    num_groups = sum(group.is_state for group in kv.groups)
    return num_states * num_groups * (kv.bytes_per_block - kv.draft_bytes)


def draft_index_bytes(config: EngineConfig) -> int:
    """Return the maximum memory of prompt lookup or suffix decoding: indexes of requests, and cached outputs."""
    speculative = config.scheduler.speculative
    if speculative is None or speculative.method not in ("ngram", "suffix"):
        return 0
    num_grams = len(grams_of(speculative))
    size = config.scheduler.max_num_seqs * index_bytes(config.model.max_model_len, num_grams)
    if speculative.method == "suffix":
        num_tokens = speculative.suffix_decoding_corpus_tokens
        size += index_bytes(num_tokens, num_grams) + num_tokens * CACHED_TOKEN_BYTES
    return size


def draft_rows(
    draft: DraftPlan | None, num_ranks: int, num_stages: int, num_hosts: int
) -> list[tuple[str, str]]:
    if draft is None:
        return []
    places = ["rank 0"] * (num_ranks > 1) + ["the first stage"] * (num_stages > 1)
    where = f", all in {' of '.join(places)}" if places else ""
    counted = " (KV on each host)" * (num_hosts > 1)
    return [
        (
            "draft model",
            f"{draft.model}: {draft.architecture}, {draft.dtype}, {format_size(draft.weight_bytes)} of weights,"
            f" {format_size(draft.kv_bytes_per_token)} of KV per token{where}, included below{counted}",
        )
    ]
