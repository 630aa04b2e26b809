"""Split a step that runs out of memory into halves, down to single tokens.

    step            [ row 0 | row 1 | row 2 ]              out of memory
    halves          [ row 0 | row 1 ]  [ row 2 ]           the second is out of memory again
    down to tokens                     [ row 2: 0…99 ]  [ row 2: 100…199 ]

Splitting changes no result:

- Rows keep their order, so a row still reads blocks that an earlier row fills (see `StepPlan`).
- Tokens of one row keep their order, as in chunked prefill.
- Repeating a started step writes the same KV values to the same slots.
- A step with drafts is first repeated without them. Outputs do not depend on drafts.

A recurrent state is overwritten by its step, so a model with states is different. It repeats a step only if all rows
start at position 0. Any other step fails, and its requests are recomputed from their tokens. Later steps of that size
are split before they start, until a larger repeatable step succeeds. The second part of a split row continues from
the states of the first.

This module does not compute steps; the caller passes ``compute``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import torch

from quintet.wire.step import PromptLogprobs, StepPlan, StepResult

log = logging.getLogger(__name__)


class OomSplit:
    """Computes steps, splits those that run out of memory, and counts the splits."""

    def __init__(
        self, release: Callable[[], None], continue_states: Callable[[int], bytes] | None = None
    ) -> None:
        """``release`` returns an allocator's cached memory to the system.

        continue_states: for a model with states, makes a slot continue from its latest states. It returns the block entries
        that pass this to a device (`quintet.executor.slots.SlotTables.continue_states`).
        """
        self._release = release
        self._continue_states = continue_states
        self.max_tokens: int | None = None
        """Token limit of a step that cannot be repeated, once a larger one ran out of memory."""
        self.num_split = 0
        self.has_lost_drafts = False

    def compute(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        """Return the result of ``compute(plan)``, or the joined results of its parts.

        Only the first part has the plan's deltas; ``compute`` may receive them again after running out of memory.
        Raises `torch.OutOfMemoryError` if a single token does not fit, or if a started step cannot be repeated.
        """
        if not self.is_to_be_cut(plan):
            try:
                return self._compute_and_record(plan, compute)
            except torch.OutOfMemoryError as error:
                self.note_shortage(plan, error)
        return self.compute_in_parts(plan, compute)

    def is_to_be_cut(self, plan: StepPlan) -> bool:
        """Return whether to split before the first attempt: the step is not repeatable and exceeds the known limit."""
        return (
            self.max_tokens is not None and num_tokens(plan) > self.max_tokens and not self._can_repeat(plan)
        )

    def note_shortage(self, plan: StepPlan, error: torch.OutOfMemoryError) -> None:
        """Record an out-of-memory error. Raises ``error`` unless the step can be split now."""
        if not self._record_shortage(plan):
            raise error
        if not self.num_split:
            log.warning(
                "step %d ran out of memory and is split; further OOM splits are not logged: %s",
                plan.step,
                " ".join(str(error).split()),
            )

    def without_drafts(self, plan: StepPlan, error: torch.OutOfMemoryError) -> StepPlan:
        """Return the plan without drafts, as the draft model ran out of memory."""
        if not self.has_lost_drafts:
            log.warning(
                "step %d has no drafts, as the draft model ran out of memory; further ones are not logged: %s",
                plan.step,
                " ".join(str(error).split()),
            )
        self.has_lost_drafts = True
        return _without_drafts(plan)

    def compute_in_parts(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        """Compute a step of several tokens in parts. No traceback may still hold tensors of the failed attempt."""
        self.num_split += 1
        self._release()
        return self._in_halves(plan, compute)

    def _in_halves(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        if _num_drafts(plan):
            return self._part(_without_drafts(plan), compute)[1]
        first, second = halves(plan)
        parts = [self._part(first, compute)]
        slot = second.slots[:4]
        if self._continue_states is not None and slot == first.slots[-4:]:
            second = msgspec.structs.replace(
                second, blocks=self._continue_states(int(np.frombuffer(slot, np.int32)[0]))
            )
        return joined(plan.step, [*parts, self._part(second, compute)])

    def _part(self, part: StepPlan, compute: Callable[[StepPlan], StepResult]) -> tuple[StepPlan, StepResult]:
        if not self.is_to_be_cut(part):
            try:
                return part, self._compute_and_record(part, compute)
            except torch.OutOfMemoryError:
                if not self._record_shortage(part):
                    raise
            self._release()
        return part, self._in_halves(part, compute)

    def _compute_and_record(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        result = compute(plan)
        if self.max_tokens is not None:
            self.max_tokens = max(self.max_tokens, num_tokens(plan))
        return result

    def _record_shortage(self, plan: StepPlan) -> bool:
        """Lower the token limit; return whether the step can be split and repeated."""
        count = num_tokens(plan)
        if self._continue_states is not None:
            self.max_tokens = max(1, count // 2)
        return count > 1 and self._can_repeat(plan)

    def _can_repeat(self, plan: StepPlan) -> bool:
        """Return whether computing a started plan again gives the same result."""
        return self._continue_states is None or not np.frombuffer(plan.starts, np.int32).any()


def num_tokens(plan: StepPlan) -> int:
    """Return the number of tokens that a plan computes, with all drafts that it allows."""
    return int(np.frombuffer(plan.counts, np.int32).sum()) + _num_drafts(plan)


def _num_drafts(plan: StepPlan) -> int:
    return int(np.maximum(np.frombuffer(plan.drafts, np.uint8).astype(np.int64) - 1, 0).sum())


def _without_drafts(plan: StepPlan) -> StepPlan:
    """Return the plan with 0 drafts in each row that allows some."""
    drafts = np.minimum(np.frombuffer(plan.drafts, np.uint8), 1).tobytes()
    return msgspec.structs.replace(plan, drafts=drafts, checksum=0)


def halves(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """Split a plan between two rows, or its only row between two tokens. The second half has no deltas."""
    if len(plan.samples) > 1:
        at = len(plan.samples) // 2
        first, second = slice(0, at), slice(at, None)
        return _rows(plan, first, is_first=True), _rows(plan, second, is_first=False)
    start, count = (int(np.frombuffer(column, np.int32)[0]) for column in (plan.starts, plan.counts))
    at = count // 2
    return (
        msgspec.structs.replace(plan, counts=_column(at), samples=b"\0", checksum=0),
        msgspec.structs.replace(
            _rows(plan, slice(0, 1), is_first=False), starts=_column(start + at), counts=_column(count - at)
        ),
    )


def _rows(plan: StepPlan, rows: slice, *, is_first: bool) -> StepPlan:
    """Return the plan with these rows only and no checksum, which covers all rows and was compared before."""

    def column(whole: bytes) -> bytes:
        return np.frombuffer(whole, np.int32)[rows].tobytes()

    part = msgspec.structs.replace(
        plan,
        slots=column(plan.slots),
        starts=column(plan.starts),
        counts=column(plan.counts),
        samples=plan.samples[rows],
        pooled_rows=[
            msgspec.structs.replace(each, row=each.row - (rows.start or 0))
            for each in plan.pooled_rows
            if each.row in range(len(plan.samples))[rows]
        ],
        drafts=plan.drafts[rows],
        checksum=0,
    )
    if is_first:
        return part
    return msgspec.structs.replace(
        part, freed=b"", new_rows=[], blocks=b"", copies=b"", swaps_out=b"", swaps_in=b""
    )


def _column(number: int) -> bytes:
    return np.array([number], np.int32).tobytes()


def joined(step: int, parts: Iterable[tuple[StepPlan, StepResult]]) -> StepResult:
    """Return the result of a split step from its ``parts``, which have relative row indexes."""
    whole = StepResult(step, 0, b"")
    num_rows, last_slot = 0, None
    for plan, result in parts:
        slots = np.frombuffer(plan.slots, np.int32)
        if slots[0] == last_slot:
            num_rows -= 1  # continues the last row of the previous part
        whole.token_ids += result.token_ids
        whole.num_tokens += result.num_tokens
        whole.num_drafts += result.num_drafts
        for drawn in result.logprobs:
            whole.logprobs.append(msgspec.structs.replace(drawn, row=drawn.row + num_rows))
        for entry in result.prompt_logprobs:
            _append(whole.prompt_logprobs, msgspec.structs.replace(entry, row=entry.row + num_rows))
        for vector in result.vectors:
            whole.vectors.append(msgspec.structs.replace(vector, row=vector.row + num_rows))
        whole.failed += (np.frombuffer(result.failed, np.int32) + np.int32(num_rows)).tobytes()
        num_rows += len(slots)
        last_slot = slots[-1]
    return whole


def _append(entries: list[PromptLogprobs], entry: PromptLogprobs) -> None:
    """Append prompt log-probabilities, merged with the previous entry if it has the same row."""
    if not entries or entries[-1].row != entry.row:
        entries.append(entry)
        return
    last = entries[-1]
    assert last.first + len(last.ranks) // 4 == entry.first and last.width == entry.width, (last, entry)
    entries[-1] = msgspec.structs.replace(
        last,
        ranks=last.ranks + entry.ranks,
        token_ids=last.token_ids + entry.token_ids,
        logprobs=last.logprobs + entry.logprobs,
    )
