"""Validation of received messages: consistent lengths, numbers in range. Every inbox validates each message once.

A valid message cannot make a process read beyond a table or fail on a number. Meaning is checked elsewhere: parameters by
the frontend (`SamplingParams.checked`), identity by the receiver, which drops, for example, an answer to an unknown query.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire import supervision
from quintet.wire.channels import Channel, RowSpans
from quintet.wire.codec import (
    ID_BYTES,
    REQUEST_BYTES,
    UNREADABLE,
    all_below,
    are_spans,
    is_byte_column,
    unpack_i32,
)
from quintet.wire.config import MAX_DRAFTS, EngineConfig
from quintet.wire.embeds import EmbedsPrompt, RowEmbeds, are_ordered
from quintet.wire.ids import MAX_ID
from quintet.wire.kv_spec import STATE_BLOCKS
from quintet.wire.kv_validate import (
    are_swaps,
    fits_tiers,
    is_kv_transfer,
    max_tier_blocks,
    operator_checks,
    tier_checks,
)
from quintet.wire.metrics import decode_snapshot
from quintet.wire.params import MAX_COUNT, SamplingParams, first_unknown
from quintet.wire.pooling import ITEM_BYTES, Pooled, are_pooled, are_vectors

LAST_FINISH = max(m.FinishReason)

Check = Callable[[Any], bool]


class Validator:
    """Validator for one server's limits, with a check per kind of message."""

    def __init__(self, config: EngineConfig) -> None:
        model, scheduler = config.model, config.scheduler
        self._vocab_size = model.vocab_size
        self._embedding_width = model.embedding_width
        self._vector_bytes = 0 if model.pooling is None else ITEM_BYTES * model.pooling.width
        self._adapters = {adapter.digest for adapter in model.adapters}
        self._max_len = model.max_model_len
        self._num_slots = scheduler.max_num_seqs
        self._block_size = model.kv.block_size
        self._num_groups = len(model.kv.groups)
        self._num_blocks = model.kv.num_blocks(config.cache.memory_bytes) or MAX_COUNT
        """On a GPU only the executor knows the number, so the limit is `MAX_COUNT`."""
        self._num_host_blocks, self._num_disk_blocks = max_tier_blocks(config)
        self._blocks_per_row = max(STATE_BLOCKS, -(-model.max_model_len // model.kv.block_size))
        self._run_dir = config.run_dir
        self._checks: dict[type[msgspec.Struct], Check] = {
            m.Submit: _submit,
            m.Admit: self._admit,
            m.Resumed: self._resumed,
            m.Live: lambda msg: not len(msg.request_ids) % REQUEST_BYTES,
            m.InFlightReport: _ids_with_attempts,
            m.Unknown: lambda msg: not len(msg.request_ids) % REQUEST_BYTES,
            m.Tokens: self._tokens,
            m.StopHit: _ids_with_attempts,
            m.Text: self._text,
            m.Tokenized: lambda msg: not len(msg.token_ids) % ID_BYTES,
            m.DetokenizeQuery: lambda msg: (
                not len(msg.token_ids) % ID_BYTES and (msg.opened is None or self._open(msg.opened))
            ),
            Pooled: lambda msg: len(msg.vector) == self._vector_bytes,
            m.Detokenized: lambda msg: not msg.spans or _are_spans_of(RowSpans(0, msg.spans), msg.text),
            **operator_checks(self._vocab_size, self._max_len),
            supervision.Topology: self._topology,
            supervision.Heartbeat: lambda msg: _is_snapshot(msg.metrics),
            supervision.MetricsQuery: lambda msg: _is_snapshot(msg.metrics),
            supervision.MetricsReport: lambda msg: all(
                _is_snapshot(figures.metrics) for figures in (*msg.processes, *msg.past)
            ),
            s.StepPlan: self._plan,
            s.StepResult: self._result,
            s.Capacity: self._capacity,
            **tier_checks(self._num_blocks, self._num_host_blocks),
        }

    def accepts(self, message: msgspec.Struct) -> bool:
        """Return True when a decoded message is valid."""
        check = self._checks.get(type(message))
        return check is None or check(message)

    # --- requests ---

    def _are_tokens(self, column: bytes) -> bool:
        return not len(column) % ID_BYTES and all_below(column, self._vocab_size)

    def _in_vocabulary(self, ids: Collection[int] | None) -> bool:
        return ids is None or first_unknown(ids, self._vocab_size) is None

    def _params(self, p: SamplingParams) -> bool:
        """Return True when the executor's tables have room for every id and number. The frontend has checked the rest."""
        bound = p.thinking_bound
        return (
            (p.logprobs is None or 0 <= p.logprobs <= self._vocab_size)
            and (p.prompt_logprobs is None or 0 <= p.prompt_logprobs <= self._vocab_size)
            and (bound is None or (bound.is_valid and self._in_vocabulary([*bound.ids()])))
            and all(map(self._in_vocabulary, (p.stop_token_ids, p.allowed_token_ids)))
            and all(map(self._in_vocabulary, (p.logprob_token_ids, p.logit_bias)))
        )

    def _admit(self, msg: m.Admit) -> bool:
        spec, repetition = msg.spec, msg.spec.params.repetition_detection
        return (
            self._params(spec.params)
            and (repetition is None or repetition.is_valid)
            and msg.request_id < MAX_ID - spec.params.n
            and self._are_tokens(spec.output_ids)
            and len(spec.output_ids) <= ID_BYTES * self._max_len
            and (spec.kv_transfer is None or is_kv_transfer(spec.kv_transfer))
            and (spec.pooling is None or self._vector_bytes > 0)
            and (not spec.adapter or spec.adapter in self._adapters)
            and self._are_tokens(msg.prompt_ids)
            and all(word and self._in_vocabulary(word) for word in msg.bad_word_ids)
            and (
                not msg.embeds
                or are_ordered(
                    msg.embeds,
                    self._embedding_width,
                    len(msg.prompt_ids) // ID_BYTES,
                    is_penalized=msg.spec.params.repetition_penalty != 1.0,
                )
            )
        )

    def _row_embeds(self, row: RowEmbeds) -> bool:
        return (
            row.span.is_whole
            and row.span.width == self._embedding_width
            and 0 <= row.slot < self._num_slots
            and 0 <= row.span.start <= row.span.end <= self._max_len
        )

    def _resumed(self, msg: m.Resumed) -> bool:
        return (msg.admit is None or self._admit(msg.admit)) and all(
            self._are_tokens(ids) for _, ids in msg.choices
        )

    # --- steps ---

    def _plan(self, msg: s.StepPlan) -> bool:
        num_rows, slots = len(msg.samples), self._num_slots
        return (
            len(msg.slots) == len(msg.starts) == len(msg.counts) == num_rows * ID_BYTES
            and not len(msg.freed) % ID_BYTES
            and not len(msg.copies) % (2 * ID_BYTES)
            and not msg.samples.strip(b"\0\1")
            and is_byte_column(msg.drafts, num_rows, 1 + MAX_DRAFTS)
            and all_below(msg.slots, slots)
            and all_below(msg.freed, slots)
            and all_below(msg.copies, self._num_blocks)
            and are_spans(msg.starts, msg.counts, self._max_len + 1)
            and self._block_entries(msg.blocks)
            and (not msg.swaps_out or are_swaps(msg.swaps_out, self._num_blocks, self._num_host_blocks))
            and (not msg.swaps_in or are_swaps(msg.swaps_in, self._num_blocks, self._num_host_blocks))
            and all(self._new_row(row) for row in msg.new_rows)
            and all(self._row_embeds(row) for row in msg.embeds)
            and (not msg.pooled_rows or are_pooled(msg.pooled_rows, msg.samples))
        )

    def _block_entries(self, blocks: bytes) -> bool:
        if len(blocks) % (4 * ID_BYTES):
            return False
        if not blocks:
            return True
        entries = memoryview(blocks).cast("i")
        return (
            all_below(entries[0::4].tobytes(), self._num_slots)
            and all_below(entries[1::4].tobytes(), self._num_groups)
            and all_below(entries[2::4].tobytes(), self._blocks_per_row)
            and all_below(entries[3::4].tobytes(), self._num_blocks)
        )

    def _new_row(self, row: s.NewRow) -> bool:
        num_tokens = len(row.token_ids) // ID_BYTES
        return (
            0 <= row.slot < self._num_slots
            and 0 <= row.seed < 2 * MAX_ID
            and 0 <= row.draft_scope < 2 * MAX_ID
            and 0 < row.num_prompt_tokens <= num_tokens <= self._max_len
            and 0 <= row.num_embedded <= row.num_prompt_tokens
            and self._are_tokens(row.token_ids)
            and self._params(row.params)
            and self._in_vocabulary(row.stop_ids)
            and all(word and self._in_vocabulary(word) for word in row.bad_word_ids)
        )

    def _result(self, msg: s.StepResult) -> bool:
        return (
            self._are_tokens(msg.token_ids)
            and (not msg.num_tokens or 4 * sum(msg.num_tokens) == len(msg.token_ids))
            and is_byte_column(msg.num_drafts, len(msg.num_tokens), MAX_DRAFTS)
            and 0 <= msg.compute_ns < MAX_ID
            and self._logprobs(msg.logprobs, self._num_slots)
            and self._prompt_logprobs(msg.prompt_logprobs, self._num_slots)
            and not len(msg.failed) % ID_BYTES
            and all_below(msg.failed, self._num_slots)
            and (not msg.vectors or are_vectors(msg.vectors, self._num_slots, self._vector_bytes))
        )

    def _capacity(self, msg: s.Capacity) -> bool:
        return (
            0 < msg.executor_epoch <= MAX_COUNT
            and 0 < msg.num_blocks <= MAX_COUNT
            and fits_tiers(msg, self._num_host_blocks, self._num_disk_blocks)
            and 0 <= msg.swap_bytes_per_s < MAX_ID
            and msg.block_size == self._block_size
            and 0 < msg.max_num_seqs <= self._num_slots
            and 1 < msg.max_model_len <= self._max_len
        )

    def _logprobs(self, entries: list[s.TokenLogprobs], num_rows: int) -> bool:
        return all(
            0 <= entry.row < num_rows
            and len(entry.token_ids) == len(entry.logprobs) >= ID_BYTES
            and self._are_tokens(entry.token_ids)
            for entry in entries
        )

    def _prompt_logprobs(self, entries: list[s.PromptLogprobs], num_rows: int) -> bool:
        return all(
            0 <= entry.row < num_rows
            and 0 < entry.first < self._max_len
            and entry.width > 0
            and len(entry.token_ids) == len(entry.logprobs) == len(entry.ranks) * entry.width
            and self._are_tokens(entry.token_ids)
            for entry in entries
        )

    # --- text ---

    def _tokens(self, msg: m.Tokens) -> bool:
        num_rows = len(msg.num_tokens)
        size = num_rows * ID_BYTES
        return (
            len(msg.request_ids) == num_rows * REQUEST_BYTES
            and len(msg.first_indexes) == size
            and len(msg.finishes) == num_rows
            and not len(msg.closed) % REQUEST_BYTES
            and len(msg.token_ids) == sum(msg.num_tokens) * ID_BYTES
            and all_below(msg.token_ids, self._vocab_size)
            and not msg.finishes.translate(None, _FINISHES)
            and is_byte_column(msg.num_drafts, num_rows, MAX_DRAFTS)
            and (not msg.named_stops or self._named_stops(msg, num_rows))
            and all(self._open(opened) for opened in msg.opens)
            and self._logprobs(msg.logprobs, num_rows)
            and self._prompt_logprobs(msg.prompt_logprobs, num_rows)
        )

    def _named_stops(self, msg: m.Tokens, num_rows: int) -> bool:
        """Return True when each is a row that stopped, with a token."""
        return (
            not len(msg.named_stops) % ID_BYTES
            and all_below(msg.named_stops, num_rows)
            and all(
                msg.num_tokens[row] and msg.finishes[row] == m.FinishReason.STOP
                for row in unpack_i32(msg.named_stops)
            )
        )

    def _open(self, opened: m.Open) -> bool:
        return (
            self._are_tokens(opened.prompt_ids)
            and self._are_tokens(opened.output_ids)
            and 0 <= opened.num_seen <= len(opened.output_ids) // ID_BYTES
        )

    def _text(self, msg: m.Text) -> bool:
        num_rows = len(msg.request_ids)
        return (
            len(msg.deltas) == len(msg.offsets) == len(msg.first_indexes) == len(msg.num_tokens) == num_rows
            and (not num_rows or min(msg.num_tokens) >= 0)
            and len(msg.token_ids) == sum(msg.num_tokens) * ID_BYTES
            and all(0 <= row.row < num_rows for row in msg.logprobs)
            and all(not len(started.prompt_ids) % ID_BYTES for started in msg.started)
            and all(0 <= row.row < num_rows and _are_spans_of(row, msg.deltas[row.row]) for row in msg.spans)
        )

    # --- supervision ---

    def _topology(self, msg: supervision.Topology) -> bool:
        return all(slot.address == f"ipc://{self._run_dir}/{slot.worker}" for slot in msg.slots)


_FINISHES = bytes(range(LAST_FINISH + 1))
NUM_CHANNELS = len(Channel)


def _are_spans_of(row: RowSpans, delta: str) -> bool:
    """Return True when the spans cover the delta exactly."""
    return sum(size for _, _, size in row.spans) == len(delta) and all(
        0 <= channel < NUM_CHANNELS and 0 <= call <= MAX_COUNT and size > 0
        for channel, call, size in row.spans
    )


def _submit(msg: m.Submit) -> bool:
    """Return True when the tokenizer can read the prompt and number the choices. The core checks the rest in `m.Admit`."""
    prompt = msg.prompt
    return (
        msg.request_id < MAX_ID - msg.spec.params.n
        and not (isinstance(prompt, m.TokenPrompt) and len(prompt.token_ids) % ID_BYTES)
        and not (isinstance(prompt, EmbedsPrompt) and not prompt.span.is_whole)
    )


def _ids_with_attempts(msg: m.StopHit | m.InFlightReport) -> bool:
    return (
        not len(msg.request_ids) % REQUEST_BYTES
        and len(msg.attempts) * REQUEST_BYTES == len(msg.request_ids) * ID_BYTES
    )


def _is_snapshot(metrics: bytes) -> bool:
    try:
        snapshot = decode_snapshot(metrics)
    except UNREADABLE:
        return False
    return all(len(series.counts) == len(series.bounds) + 1 for series in snapshot.histograms)
