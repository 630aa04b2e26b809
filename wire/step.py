"""Messages of one step: the core's plan and the executor's result.

Columns are packed by `quintet.wire.codec`. ``R`` is the number of rows in the step, ``S`` the number of rows that
sample. The core chooses the order of rows; results use the same order.
"""

from __future__ import annotations

import msgspec

from quintet.wire.embeds import RowEmbeds
from quintet.wire.kv_tiers import TierCapacity
from quintet.wire.params import SamplingParams
from quintet.wire.pooling import PooledRow, RowVector


class NewRow(msgspec.Struct, array_like=True, gc=False):
    """A request that enters a slot, with all that the device needs.

    ``token_ids`` (int32) are the prompt and the outputs it already has (after preemption, recovery or a fork).
    """

    slot: int
    generation: int
    request_id: int
    token_ids: bytes
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """Key of the counter-based RNG (uint64); with the position it determines every draw."""
    stop_ids: list[int] = []
    """Tokens that end the request; masked until it has its minimum number of outputs."""
    bad_word_ids: list[list[int]] = []
    num_embedded: int = 0
    """Number of leading prompt tokens given as embeddings; penalties ignore their placeholder ids."""
    draft_scope: int = 0
    """Suffix decoding uses outputs of earlier requests with the same number: a hash of cache salt and adapter."""
    adapter: bytes = b""
    """See `quintet.wire.request.RequestSpec`."""


class StepPlan(msgspec.Struct, array_like=True, tag="plan", gc=False):
    """One step: changes of the executor's tables, then the rows to compute.

    In each layer, KV of all rows is written before any row reads: a row may read blocks that an earlier row of the
    step fills.
    """

    step: int
    sent_ns: int
    freed: bytes
    """Freed slots (int32); applied first."""
    new_rows: list[NewRow]
    blocks: bytes
    """int32 quadruples ``slot, group, position in its block table, block id``: entries added or replaced.

    Applied after ``new_rows``. Groups are those of the model's `KvSpec`.
    """
    copies: bytes
    """int32 pairs ``from block, to block``: contents copied before this step computes (copy-on-write)."""
    slots: bytes
    """int32[R]"""
    starts: bytes
    """int32[R]: tokens of the row with existing KV; the first position computed now."""
    counts: bytes
    """int32[R]: tokens computed now. Token values come from the executor's own token table."""
    samples: bytes
    """uint8[R]: 1 where the row ends at its newest token and so draws the next one (written at ``start + count``).

    Inside the executor, the number of the row's last tokens after each of which one is drawn (`drafts`).
    """
    checksum: int = 0
    """CRC-32 of the tables after the changes, when ``SchedulerConfig.audit``; 0 otherwise."""
    tables_epoch: int = 0
    """Version of the slot tables (`Capacity.tables_epoch`); the executor drops plans for tables that it has emptied since."""
    swaps_out: bytes = b""
    """int32 pairs ``device block, host block``: contents copied to host memory, before all other operations."""
    swaps_in: bytes = b""
    """int32 pairs ``device block, host block``: contents copied back, after ``swaps_out`` and before ``copies``."""
    embeds: list[RowEmbeds] = []
    """Embeddings of tokens that have no ids."""
    pooled_rows: list[PooledRow] = []
    drafts: bytes = b""
    """uint8[R], or empty for zeros: 1 + the number of draft tokens that the row may verify.

    Such a row computes the newest token that the executor knows, and drafts that the executor chooses. Its start is a
    lower bound, because earlier steps may have accepted drafts. Its blocks suffice for all drafts.
    """


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one sampled position: the drawn token first, then alternatives, most likely first.

    A row with several tokens has one entry per token, in order.
    """

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


class DraftCounts(msgspec.Struct, array_like=True, gc=False):
    """Draft tokens of one choice."""

    num_draft_tokens: int = 0
    """Verified draft tokens."""
    num_steps: list[int] = []
    """Steps that verified drafts, by the number of accepted ones, from 0 on."""

    def note(self, num_drafts: int, num_accepted: int) -> None:
        self.num_draft_tokens += num_drafts
        self.num_steps += [0] * (num_accepted + 1 - len(self.num_steps))
        self.num_steps[num_accepted] += 1


class StepResult(msgspec.Struct, array_like=True, tag="result", gc=False):
    """Result of one step."""

    step: int
    sent_ns: int
    token_ids: bytes
    """int32: the drawn tokens, in the order of the plan's sampling rows."""
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []
    wait_ns: int = 0
    """Time between the end of the previous step and the start of this one."""
    compute_ns: int = 0
    """Time in the model and sampler."""
    num_active_slots: int | None = None
    """Occupied slots after the plan, for comparison with the core's count; None disables the check."""
    num_tokens: bytes = b""
    """uint8[S]: tokens of each sampling row in ``token_ids``, 1 + accepted drafts; empty where each row drew one."""
    num_drafts: bytes = b""
    """uint8[S]: drafts that each sampling row verified; empty where there were none."""
    failed: bytes = b""
    """int32: rows of the plan that drew a token and cannot continue. Their requests end with an error."""
    vectors: list[RowVector] = []


class StepsEnded(msgspec.Struct, array_like=True, tag="ended", gc=False):
    """Number of further steps that have ended on the device, in order, with or without an error.

    Not sent between processes: the executor's waiting thread posts it to its loop. It is a message so that recordings
    contain it.
    """

    count: int


class Capacity(msgspec.Struct, array_like=True, tag="capacity", gc=False):
    """The executor is ready with empty tables; its capacity.

    Sent to the core after loading, to each new core, and whenever a step failed and the tables were emptied (`failure`).
    """

    executor_epoch: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    tables_epoch: int = 0
    """Number of times this executor has emptied its tables."""
    failure: str = ""
    """Exception of the newest step, if that is the reason."""
    num_host_blocks: int = 0
    """Host blocks for offloaded KV; empty too."""
    swap_bytes_per_s: int = 0
    """Copy speed between device and host, the slower direction; 0 when not measured."""
    tiers: list[TierCapacity] = []
    """Back ends of KV blocks. Their staging blocks are numbered after `num_host_blocks`, in this order."""
