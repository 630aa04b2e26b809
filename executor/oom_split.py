"""A step for which memory runs out is computed in halves: slower, and nobody ends for it.

    step            [ row 0 | row 1 | row 2 ]              out of memory
    halves          [ row 0 | row 1 ]  [ row 2 ]           the second is out of memory again
    down to tokens                     [ row 2: 0…99 ]  [ row 2: 100…199 ]

That changes no result. Rows come in their order, so one that reads blocks which another fills still comes behind it (see
`StepPlan`); tokens of one row come in their order, as in a prompt that the core computes in pieces; and computing
once more what was begun writes the same values to the same places. Not so a state, which is written over what it was made
from. In a model with states only a step whose rows all begin their requests, with states of zeros, is computed once more. Any
other one fails, its requests are computed again from their tokens, and from then on steps of so many tokens are cut
before they begin; until one that can be repeated finds room again.

The later tokens of a row that is cut go on from where the earlier ones left its states.

Owns the cutting and joining. Knows nothing of how a step is computed.
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
    """Computes steps, in parts if need be, and counts those."""

    def __init__(self, release: Callable[[], None], go_on: Callable[[int], bytes] | None = None) -> None:
        """``release`` gives the system the memory back that an allocator keeps for later.

        go_on: of a model with states, lets a slot's tokens go on from where its last ones left its states, and returns the
        block entries that say so to a device (`quintet.executor.slots.SlotTables.go_on`).
        """
        self._release = release
        self._go_on = go_on
        self._most_tokens: int | None = None
        """Of a step that cannot be repeated, since one of more ran out of memory."""
        self.num_split = 0

    def compute(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        """Return what ``compute(plan)`` returns, or the joined results of the parts it had to be called with.

        A part has the plan's deltas if it is the first one, and no others: ``compute`` may meet them again after it ran
        out of memory. Raises `torch.OutOfMemoryError` when not even one token fits, or what was begun cannot be repeated.
        """
        if not self.is_to_be_cut(plan):
            try:
                return self._tried(plan, compute)
            except torch.OutOfMemoryError as error:
                self.note_shortage(plan, error)
        return self.compute_in_parts(plan, compute)

    def is_to_be_cut(self, plan: StepPlan) -> bool:
        """Whether a step must not be tried whole: it could not be repeated, and one as large ran out of memory."""
        return (
            self._most_tokens is not None
            and num_tokens(plan) > self._most_tokens
            and not self._can_repeat(plan)
        )

    def note_shortage(self, plan: StepPlan, error: torch.OutOfMemoryError) -> None:
        """Take in that memory ran out in a step. Raises ``error`` unless the step can be computed in parts now."""
        if not self._shrinks(plan):
            raise error
        if not self.num_split:
            log.warning(
                "memory ran out in step %d; it is computed in parts, and so are others from now on, without a word: %s",
                plan.step,
                " ".join(str(error).split()),
            )

    def compute_in_parts(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        """Compute a step of several tokens that is too large. No traceback may still hold an attempt's tensors."""
        self.num_split += 1
        self._release()
        return self._in_halves(plan, compute)

    def _in_halves(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        first, second = halves(plan)
        parts = [self._part(first, compute)]
        slot = second.slots[:4]
        if self._go_on is not None and slot == first.slots[-4:]:
            second = msgspec.structs.replace(
                second, blocks=self._go_on(int(np.frombuffer(slot, np.int32)[0]))
            )
        return joined(plan.step, [*parts, self._part(second, compute)])

    def _part(self, part: StepPlan, compute: Callable[[StepPlan], StepResult]) -> tuple[StepPlan, StepResult]:
        if not self.is_to_be_cut(part):
            try:
                return part, self._tried(part, compute)
            except torch.OutOfMemoryError:
                if not self._shrinks(part):
                    raise
            self._release()
        return part, self._in_halves(part, compute)

    def _tried(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        result = compute(plan)
        if self._most_tokens is not None:
            self._most_tokens = max(self._most_tokens, num_tokens(plan))
        return result

    def _shrinks(self, plan: StepPlan) -> bool:
        """Take note that this was too much; return whether it can be computed in parts."""
        count = num_tokens(plan)
        if self._go_on is not None:
            self._most_tokens = max(1, count // 2)
        return count > 1 and self._can_repeat(plan)

    def _can_repeat(self, plan: StepPlan) -> bool:
        """Whether computing the plan once more, after it was begun, gives the same."""
        return self._go_on is None or not np.frombuffer(plan.starts, np.int32).any()


def num_tokens(plan: StepPlan) -> int:
    """Return how many tokens a plan computes."""
    return int(np.frombuffer(plan.counts, np.int32).sum())


def halves(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """Cut a plan between two rows, or the only one between two tokens. The second half has no deltas."""
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
    """Return the plan with these rows only. Its checksum is of all rows together: it was compared before."""

    def column(whole: bytes) -> bytes:
        return np.frombuffer(whole, np.int32)[rows].tobytes()

    part = msgspec.structs.replace(
        plan,
        slots=column(plan.slots),
        starts=column(plan.starts),
        counts=column(plan.counts),
        samples=plan.samples[rows],
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
    """Return the result of the step that was cut into ``parts``, which name rows of their own."""
    whole = StepResult(step, 0, b"")
    num_rows, last_slot = 0, None
    for plan, result in parts:
        slots = np.frombuffer(plan.slots, np.int32)
        if slots[0] == last_slot:
            num_rows -= 1  # the rest of the row that the part before ends with
        whole.token_ids += result.token_ids
        for drawn in result.logprobs:
            whole.logprobs.append(msgspec.structs.replace(drawn, row=drawn.row + num_rows))
        for entry in result.prompt_logprobs:
            _append(whole.prompt_logprobs, msgspec.structs.replace(entry, row=entry.row + num_rows))
        whole.failed += (np.frombuffer(result.failed, np.int32) + np.int32(num_rows)).tobytes()
        num_rows += len(slots)
        last_slot = slots[-1]
    return whole


def _append(entries: list[PromptLogprobs], entry: PromptLogprobs) -> None:
    """Append what is known of a row's prompt, to what is already known of the same one."""
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
