"""Memory of speculative decoding in `quintet plan`: the draft model, and saved recurrent states."""

from __future__ import annotations

import msgspec

from quintet.deploy.config.memory import format_size
from quintet.executor.model_config.state_specs import (
    STATES_PER_REQUEST,
    num_draft_model_states,
    num_draft_states,
)
from quintet.wire.config import EngineConfig


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


def draft_rows(
    draft: DraftPlan | None, num_ranks: int, num_stages: int, num_hosts: int
) -> list[tuple[str, str]]:
    """Return the rows of the printed plan."""
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
