"""Verification of draft tokens in the step that computes them.

The drafts are appended to the row, which then draws after each of its tokens, with the position of the draw. Draws
are accepted up to the first that differs from the draft after it: the tokens are those without
drafts, bit for bit.

    tokens    … t5              the executor knows 6 tokens; the plan allows 3 drafts
    row             t5 d6 d7 d8
    draws           t6 t7 t8 t9    d6 = t6, d7 ≠ t7: t6 and t7 are accepted

Rejected drafts leave keys and values after the newest token. Later steps overwrite them before they read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.kv_memory import KvMemory
from quintet.executor.model_config.share import most_outputs
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import Grammars
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.speculation.acceptance import accept
from quintet.executor.speculation.draft_states import DraftStates
from quintet.executor.speculation.drafters import DRAFTERS, Drafter, DraftRows, MakeDrafter
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.speculation.grammar_drafts import GrammarDrafts
from quintet.executor.speculation.lengths import DraftCosts, DraftCounts, DraftLengths, StepCost
from quintet.executor.speculation.plain_steps import PlainSteps
from quintet.executor.speculation.unknown_draws import UnknownDraws
from quintet.wire.config import EngineConfig
from quintet.wire.step import StepPlan, StepResult

NO_STARTS: Int = np.empty(0, np.int64)


def until_stop(drafts: Tokens, stop_ids: frozenset[int]) -> Tokens:
    """Return the drafts before the first stop token. It is drawn after them, as the last token of the request."""
    for index, token in enumerate(drafts.tolist()):
        if token in stop_ids:
            return drafts[:index]
    return drafts


@dataclass(slots=True, eq=False)
class DraftedStep:
    """A plan with drafts, between its start and its result."""

    plan: StepPlan
    """The plan, with the executor's starts; rows with drafts compute and draw more tokens."""
    starts: Int
    drafts: list[tuple[int, Tokens]]
    """Rows with drafts, ascending."""
    asked: DraftCounts | None
    """Chosen number of drafts of the slots that were asked for them."""
    proposing_s: float
    """Time spent on choosing and proposing drafts."""
    began_s: float
    """Start of the computation."""
    uses: Int
    """Requests of the slots (`UnknownDraws.uses`); a step may end after its slot has another one."""
    plain: PlainSteps | None = None
    """Steps that this one continues, if it has no drafts and the same rows; ``starts`` is empty then."""


class Speculation:
    """Drafts of a worker's slots."""

    def __init__(
        self,
        drafter: Drafter,
        tables: SlotTables,
        grammars: Grammars,
        max_rows: int,
        max_tokens: int,
        states: DraftStates | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        copies_tokens: bool = False,
    ) -> None:
        """max_rows, max_tokens: the largest step, drafts included. states: of a model with recurrent states.

        copies_tokens: ``tables`` have a token table of their own, to which tokens are copied here; else the sampler writes it.
        """
        self._clock = clock
        self._token_ids: Tokens = tables.token_ids.numpy()
        self._max_rows, self._max_tokens, self._states = max_rows, max_tokens, states
        self._copies_tokens = copies_tokens
        self._unknown = UnknownDraws(len(self._token_ids))
        self.drafter = drafter
        self._grammars, self._grammar_drafts = grammars, GrammarDrafts(grammars)
        self._num_tokens: Int = np.zeros(len(self._token_ids), np.int64)
        """Known tokens of each slot."""
        self._stop_ids: list[frozenset[int]] = [frozenset()] * len(self._token_ids)
        """Tokens that end the request of each slot."""
        self._ended_s = 0.0
        """End of the last step. Steps overlap in a pipeline; the later one is measured from there."""
        self._lengths = DraftLengths(len(self._token_ids))
        self._plain: PlainSteps | None = None
        """The newest steps, while they have no drafts and the same rows."""

    def end_requests(self, plan: StepPlan) -> None:
        """Note the freed slots of a plan, before the slot tables change."""
        if plan.freed or plan.new_rows or plan.copies or plan.swaps_in:
            self._end_plain()
        for slot in np.frombuffer(plan.freed, np.int32).tolist():
            self.drafter.end(slot, int(self._num_tokens[slot]))
            self._lengths.end(slot)
            self._grammars.end(slot)

    def note(self, plan: StepPlan) -> None:
        """Note a plan before `begin`, also one without drafts. The slot tables hold its deltas."""
        for new in plan.new_rows:
            self._num_tokens[new.slot] = len(new.token_ids) // 4
            self._stop_ids[new.slot] = frozenset(new.stop_ids)
            self._lengths.begin(new.slot)
            self._unknown.new_request(new.slot)
            if self._copies_tokens:
                self._token_ids[new.slot, : len(new.token_ids) // 4] = np.frombuffer(new.token_ids, np.int32)
        self.drafter.note(plan)

    def reset(self) -> None:
        """Forget the steps in flight: their results are dropped, and all slots are free."""
        self._plain = None
        self._unknown.reset()

    def waits_for(self, plan: StepPlan) -> bool:
        """Return whether a step in flight must end before this plan begins: its tokens or their number are needed."""
        most = max(plan.drafts, default=0)
        if not most:
            return False
        slots, plain = np.frombuffer(plan.slots, np.int32), self._plain
        num_plain = 0 if plain is None else plain.num_begun - plain.num_steps
        if not num_plain and not self._unknown.of(slots).any():
            return False
        return self._unknown.have_drafts(slots) or (most > 1 and self._is_due())

    def _is_due(self) -> bool:
        """Return whether to choose drafts in the next step."""
        return self._lengths.is_due(has_forced=self._grammars.is_used)

    def compute(self, plan: StepPlan, compute: Callable[[StepPlan], StepResult]) -> StepResult:
        """Return the result of a plan, with drafts where it allows them. ``compute`` computes and draws rows."""
        if not plan.drafts:
            result = compute(plan)
            self.end_without_drafts(plan)
            return result
        step = self.begin(plan)
        try:
            result = compute(step.plan)
        except torch.OutOfMemoryError:
            self.cancel(step)
            raise
        self.end(step, result)
        return result

    def end_without_drafts(self, plan: StepPlan) -> None:
        """Note a computed plan for which `begin` was not called."""
        self._end_plain()
        slots, starts, counts = (
            np.frombuffer(column, np.int32) for column in (plan.slots, plan.starts, plan.counts)
        )
        self._note_computed(slots, starts, counts, counts)

    def begin(self, plan: StepPlan) -> DraftedStep:
        """Add drafts to a plan for which `waits_for` is False."""
        began_s, is_due, plain = self._clock(), self._is_due(), self._plain
        self._lengths.begin_step()
        if plain is not None and not is_due and plain.has_next(plan):
            return DraftedStep(plain.next(plan), NO_STARTS, [], None, 0.0, began_s, plain.uses, plain)
        self._end_plain()
        slots, most = np.frombuffer(plan.slots, np.int32), np.frombuffer(plan.drafts, np.uint8)
        unknown = self._unknown.of(slots)
        newest = self._num_tokens[slots] + unknown - 1
        starts = np.where(most > 0, newest, np.frombuffer(plan.starts, np.int32))
        columns = {"starts": starts.astype(np.int32).tobytes()}
        asked, drafts = None, list[tuple[int, Tokens]]()
        samples = np.frombuffer(plan.samples, np.uint8)
        if is_due and not unknown.any():
            asked, drafts = self._propose(plan, slots, starts, most)
        if drafts:
            counts, samples = np.frombuffer(plan.counts, np.int32).copy(), samples.copy()
            for row, proposed in drafts:
                counts[row] += len(proposed)
                samples[row] += len(proposed)
            columns |= {"counts": counts.tobytes(), "samples": samples.tobytes()}
            self._unknown.add_drafts(slots[samples > 1])
        self._unknown.add(slots[samples > 0])
        drafted = msgspec.structs.replace(plan, **columns, drafts=b"")
        proposed_s = self._clock()
        uses = self._unknown.uses(slots)
        return DraftedStep(drafted, starts, drafts, asked, proposed_s - began_s, proposed_s, uses)

    def cancel(self, step: DraftedStep) -> None:
        """Forget the newest step that began: it failed, and is computed again in parts."""
        if step.plain is not None:
            step.plain.num_begun -= 1
            return
        slots, samples = (
            np.frombuffer(step.plan.slots, np.int32),
            np.frombuffer(step.plan.samples, np.uint8),
        )
        self._unknown.remove(slots[samples > 0])

    def end(self, step: DraftedStep, result: StepResult) -> None:
        """Verify the drafts of a computed step: remove rejected tokens from its result."""
        ended_s = self._clock()
        seconds, self._ended_s = ended_s - max(step.began_s, self._ended_s), ended_s
        if self._copies_tokens:
            self._copy_tokens(step, result)
        if step.plain is not None:
            self._end_plain_step(step.plain, step.plan, result, seconds)
            return
        slots, samples = np.frombuffer(step.plan.slots, np.int32), np.frombuffer(step.plan.samples, np.uint8)
        counts = np.frombuffer(step.plan.counts, np.int32)
        num_tokens, verified = samples, list[tuple[int, int, int]]()
        if step.drafts:
            num_tokens = accept(result, samples, step.drafts)
            is_current = self._unknown.is_current(slots, step.uses).tolist()
            verified = [
                (int(slots[row]), len(drafts), int(num_tokens[row]) - 1)
                for row, drafts in step.drafts
                if is_current[row]
            ]
            for slot, num_drafts, num_accepted in verified:
                self._lengths.note(slot, num_accepted, num_drafts, self._grammar_drafts.num_forced(slot))
            if self._states is not None:
                self._states.restore(verified)
        sampling = np.flatnonzero(samples)
        result.num_tokens = num_tokens[sampling].tobytes()
        result.num_drafts = (samples[sampling] - 1).astype(np.uint8).tobytes()
        known = step.starts + counts - samples + num_tokens
        current = sampling[self._unknown.is_current(slots[sampling], step.uses[sampling])]
        self._num_tokens[slots[current]] = known[current] + 1
        self._unknown.remove(slots[current])
        cost = StepCost(
            num_tokens=int(counts.sum()) if step.plan.counts == samples.astype(np.int32).tobytes() else 0,
            seconds=seconds,
            overhead_s=step.proposing_s + self._clock() - ended_s,
            num_drafts=sum(num_drafts for _, num_drafts, _ in verified),
            num_accepted=sum(num_accepted for _, _, num_accepted in verified),
        )
        self._lengths.note_step(slots[sampling].astype(np.int64), len(sampling), cost, step.asked)
        self._note_computed(slots, step.starts, counts, known - step.starts)
        has_same_requests = len(current) == len(slots) and not self._unknown.of(slots).any()
        if cost.num_tokens == len(slots) and not step.drafts and has_same_requests:
            self._end_plain()
            starts = (step.starts + 1).astype(np.int32)
            self._plain = PlainSteps(step.plan, slots, starts, step.uses, self._max_tokens)

    def _copy_tokens(self, step: DraftedStep, result: StepResult) -> None:
        """Copy the drawn tokens of a step to the token table, those after rejected drafts included."""
        rows, tokens = Rows(step.plan), np.frombuffer(result.token_ids, np.int32)
        is_current = self._unknown.is_current(rows.slots, step.uses)[rows.sampling]
        owners = rows.slots[rows.sampling][is_current]
        self._token_ids[owners, rows.draw_positions[is_current]] = tokens[is_current]

    def _end_plain_step(self, plain: PlainSteps, plan: StepPlan, result: StepResult, seconds: float) -> None:
        plain.end(result, seconds)
        if plain is self._plain:
            if self.drafter.reads_steps:
                plain.hidden.append(self.drafter.observe(len(plain.slots)).copy())
            return
        slots = plain.slots[self._unknown.is_current(plain.slots, plain.uses)]  # a later step has closed them
        self._num_tokens[slots] += 1
        self._unknown.remove(slots)
        ones = np.ones(len(plain.slots), np.int64)
        self._note_computed(plain.slots, np.frombuffer(plan.starts, np.int32), ones, ones)

    def _end_plain(self) -> None:
        """Update tables and statistics after steps of the same rows without drafts."""
        plain, self._plain = self._plain, None
        if plain is None:
            return
        if plain.num_begun > plain.num_steps:
            self._unknown.add(plain.slots, plain.num_begun - plain.num_steps)
        if not plain.num_steps:
            return
        num_rows, num_steps = len(plain.slots), plain.num_steps
        self._num_tokens[plain.slots] += num_steps
        cost = StepCost(num_rows, plain.seconds / num_steps, 0.0, 0, 0, num_steps)
        self._lengths.note_step(plain.slots.astype(np.int64), num_rows, cost)
        if plain.hidden:
            counts = np.full(num_rows, num_steps)
            hidden = np.stack(plain.hidden, axis=1).reshape(num_rows * num_steps, -1)
            self.drafter.note_computed(
                plain.slots.astype(np.int64), plain.starts.astype(np.int64), counts, counts, hidden
            )

    def _note_computed(
        self,
        slots: NDArray[np.integer],
        starts: NDArray[np.integer],
        counts: NDArray[np.integer],
        num_valid: NDArray[np.integer],
    ) -> None:
        """Pass the rows of a step to a drafter that reads them."""
        if not self.drafter.reads_steps:
            return
        self.drafter.note_computed(
            slots.astype(np.int64),
            starts.astype(np.int64),
            counts.astype(np.int64),
            num_valid.astype(np.int64),
            self.drafter.observe(int(counts.sum())),
        )

    def _propose(
        self, plan: StepPlan, slots: NDArray[np.int32], starts: Int, most: NDArray[np.uint8]
    ) -> tuple[DraftCounts | None, list[tuple[int, Tokens]]]:
        """Return the number of drafts by asked row, and the drafts by row, which are also in the token table.

        starts: int64[R], of the executor.
        """
        rows = self._running_rows(slots, starts, np.flatnonzero(most > 1))
        if not len(rows):
            return None, []
        limits = most[rows].astype(np.int64) - 1
        num_forced = self._grammar_drafts.begin(slots[rows].astype(np.int64), limits)
        asked = self._choose(
            plan, DraftRows(slots[rows].astype(np.int64), starts[rows] + 1, limits), num_forced
        )
        is_asked = asked.counts > 0
        if not is_asked.any():
            return None, []
        asked = asked.of_rows(is_asked)
        rows = rows[is_asked]
        begins = starts[rows].astype(np.int64) + 1
        proposals = self._grammar_drafts.propose(DraftRows(asked.slots, begins, asked.counts), self.drafter)
        drafts: list[tuple[int, Tokens]] = []
        for row, begin, proposed in zip(rows.tolist(), begins.tolist(), proposals, strict=True):
            tokens = until_stop(proposed, self._stop_ids[slots[row]]).copy()
            if len(tokens):
                self._token_ids[slots[row], begin : begin + len(tokens)] = tokens
                drafts.append((row, tokens))
        has_drafts, searched = np.array([len(each) > 0 for each in proposals]), asked.slots
        if not has_drafts.all():
            missing = self.drafter.num_missing(searched, begins)
            if missing is not None:  # some need further steps
                searched, has_drafts = searched[missing == 0], has_drafts[missing == 0]
        self._lengths.note_found(searched, has_drafts)
        return asked, drafts

    def _choose(self, plan: StepPlan, rows: DraftRows, num_forced: Int) -> DraftCounts:
        """Return the number of drafts of each row, within the limits of a step."""
        num_draws = plan.samples.count(1)
        num_planned = int(np.frombuffer(plan.counts, np.int32).sum())
        num_free = min(self._max_tokens - num_planned, self._max_rows - num_draws)
        if self._states is not None:
            num_free = min(num_free, self._states.num_states)
        costs = DraftCosts(self.drafter.step_time, self.drafter.num_missing(rows.slots, rows.num_tokens))
        asked = self._lengths.choose(rows.slots, rows.counts, num_draws, costs, num_forced)
        used = np.cumsum(asked.counts)
        asked.counts[:] -= np.clip(used - num_free, 0, asked.counts)  # the last rows get fewer
        return asked

    def _running_rows(self, slots: NDArray[np.int32], starts: Int, rows: Int) -> Int:
        """Return those of the rows that do not begin with a stop token.

        The core relies on it: the state after a stop token is exact (`quintet.core.scheduler_state`).
        """
        newest = self._token_ids[slots[rows], starts[rows]].tolist()
        stop_ids = [self._stop_ids[slot] for slot in slots[rows].tolist()]
        runs = [token not in stops for token, stops in zip(newest, stop_ids, strict=True)]
        return rows[np.array(runs, np.bool_)]


def open_speculation(
    config: EngineConfig,
    tables: SlotTables,
    sampler: Sampler,
    grammars: Grammars,
    kv: KvMemory,
    copy: Callable[[bytes], None],
    make_drafter: MakeDrafter | None,
) -> Speculation | None:
    """Return the drafts of a worker with its tables on the host; None without speculative decoding.

    kv, copy: see `DraftStates`. make_drafter: of the draft model, if there is one.
    """
    limits, speculative = config.scheduler, config.scheduler.speculative
    if speculative is None:
        return None
    if make_drafter is not None:
        drafter = make_drafter(tables, sampler)
    else:
        drafter = DRAFTERS[speculative.method](speculative, tables)
    states = DraftStates(tables, kv, copy) if config.model.kv.has_states else None
    return Speculation(drafter, tables, grammars, most_outputs(limits), limits.max_num_batched_tokens, states)
