"""The hot pair: what the core asks of the executor each step, and what comes back.

Columns are packed by `quintet.wire.codec`. ``R`` is the number of rows in the step, ``S`` the number of rows that
sample. The order of rows is the core's choice; results come back in the same order.
"""

from __future__ import annotations

import msgspec

from quintet.wire.embeds import RowEmbeds
from quintet.wire.params import SamplingParams


class NewRow(msgspec.Struct, array_like=True, gc=False):
    """A request enters a slot: everything the device must know of it.

    ``token_ids`` (int32) are the prompt followed by outputs it already has (after preemption, recovery or a fork).
    """

    slot: int
    generation: int
    request_id: int
    token_ids: bytes
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """Key of the counter-based RNG (uint64); with the position it decides every draw."""
    stop_ids: list[int] = []
    """Tokens that end the request; masked until ``min_tokens`` outputs exist."""
    bad_word_ids: list[list[int]] = []
    num_embedded: int = 0
    """Of the prompt, so many tokens are vectors (`StepPlan.embeds`), and their ids mean nothing."""


class StepPlan(msgspec.Struct, array_like=True, tag="plan", gc=False):
    """One step: deltas to the executor's tables, then the rows to compute.

    In each layer, KV of all rows is written before any row reads: a row may read blocks that one before it fills.
    """

    step: int
    sent_ns: int
    freed: bytes
    """Slots (int32) whose tenant left; applied first."""
    new_rows: list[NewRow]
    blocks: bytes
    """int32 quadruples ``slot, group, position in its block table, block id``: entries added or replaced; applied after
    ``new_rows``. Groups are those of the model's `KvSpec`."""
    copies: bytes
    """int32 pairs ``from block, to block``: contents copied before this step computes (copy-on-write)."""
    slots: bytes
    """int32[R]"""
    starts: bytes
    """int32[R]: tokens of the row whose KV is already there; the first position computed now."""
    counts: bytes
    """int32[R]: tokens computed now. Token values come from the executor's own token table."""
    samples: bytes
    """uint8[R]: 1 where the row ends at its newest token and so draws the next one (written at ``start + count``)."""
    checksum: int = 0
    """CRC-32 of the tables after the deltas, when ``SchedulerConfig.audit``; 0 otherwise."""
    tables: int = 0
    """`Capacity.tables` that the plan is for; the executor drops plans for tables that it has emptied since."""
    swaps_out: bytes = b""
    """int32 pairs ``device block, host block``: contents copied to host memory, before all that follows."""
    swaps_in: bytes = b""
    """int32 pairs ``device block, host block``: contents copied back, after ``swaps_out`` and before ``copies``."""
    embeds: list[RowEmbeds] = []
    """Vectors of the tokens of rows that have some in place of ids."""


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one sampled position: the drawn token first, then alternatives, most likely first."""

    row: int
    """Index among the rows of the plan."""
    rank: int
    """1 for the most likely token."""
    token_ids: bytes
    """int32[1 + k]"""
    logprobs: bytes
    """float32[1 + k]"""


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of prompt tokens that became known in this step.

    Entry ``i`` is about the token at ``first + i``, given everything before it (position 0 has none).
    """

    row: int
    first: int
    width: int
    """Ids per entry: the actual token first, then the most likely ones."""
    ranks: bytes
    """int32[entries]"""
    token_ids: bytes
    """int32[entries, width]"""
    logprobs: bytes
    """float32[entries, width]"""


class StepResult(msgspec.Struct, array_like=True, tag="result", gc=False):
    """What one step produced."""

    step: int
    sent_ns: int
    token_ids: bytes
    """int32[S]: the drawn tokens, in the order of the plan's sampling rows."""
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []
    wait_ns: int = 0
    """Time between the end of the previous step and the start of this one."""
    compute_ns: int = 0
    """Time in the model and sampler."""
    num_tenants: int | None = None
    """Slots that have one after the plan, for the core to compare with its own; None says nothing."""
    failed: bytes = b""
    """int32: rows of the plan that drew a token and cannot go on behind it. Their requests end with an error."""


class StepsEnded(msgspec.Struct, array_like=True, tag="ended", gc=False):
    """So many more of the steps that the executor began have ended, in their order, whatever became of them.

    Never sent: the thread that waits for the device tells the executor's loop. It is a message so that a recording says
    in which turn the loop knew.
    """

    count: int


class Capacity(msgspec.Struct, array_like=True, tag="capacity", gc=False):
    """The executor is ready, its tables are empty, and this is what it has.

    Sent to the core once it is loaded, and again whenever a step failed and the tables were emptied (`failure`).
    """

    executor_epoch: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    tables: int = 0
    """How often this executor has emptied its tables."""
    failure: str = ""
    """Why: what the newest step raised."""
    num_host_blocks: int = 0
    """Blocks of host memory, for contents that the device has no room for; empty too."""
    swap_bytes_per_s: int = 0
    """How fast blocks are copied between device and host, the slower way; 0 when that was not measured."""
    num_disk_blocks: int = 0
    """Blocks there is room for on disk (`quintet.wire.kv_disk`)."""
    num_staging_blocks: int = 0
    """Host blocks that they are read into; their numbers follow those of `num_host_blocks`."""
    num_peer_blocks: int | None = None
    """Host blocks that those of other servers are fetched into, numbered behind those; None where there are no peers."""
    num_store_blocks: int = 0
    """Host blocks that those of a shared store are fetched into, numbered behind all others."""
