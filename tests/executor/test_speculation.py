"""Steps with and without drafts of simulated requests: starts of rows, and the time that a drafter takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quintet.executor.memory import Bits
from quintet.executor.slots import SlotTables
from quintet.executor.speculation.drafters import DraftRows
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.speculation.verify import Speculation
from quintet.wire.codec import pack_i32, pack_u8, unpack_i32
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan, StepResult

NUM_SLOTS, NUM_PROMPT, MOST = 3, 4, 6


class NoGrammars:
    is_used = False

    def end(self, slot: int) -> None:
        pass


def token_at(position: int) -> int:
    return 7 * position % 50


class Simulation:
    """An executor with requests that generate `token_at`, and a drafter with a simulated duration."""

    step_time = 0.0, 0.0
    output_cache = None
    reads_steps = False

    def __init__(self, share: float, step_s: float = 0.01, proposing_s: float = 0.0) -> None:
        """share: share of correct drafts. step_s: time of a step with one token; each further token takes a tenth of it."""
        self.tables = SlotTables(NUM_SLOTS, 4000, full_layers(1, 1, 16, 4, 16), torch.device("cpu"))
        self.now_s, self.step_s, self.proposing_s, self.proposed_s = 0.0, step_s, proposing_s, 0.0
        self.share, self.rng = share, random.Random(0)
        clock: Any = lambda: self.now_s  # noqa: E731
        grammars: Any = NoGrammars()
        self.speculation = Speculation(self, self.tables, grammars, 64, 512, clock=clock)
        self.lengths = [0] * NUM_SLOTS
        """Known tokens of each slot."""
        self.starts: list[list[int]] = []
        """Of each computed step."""

    def end(self, slot: int, num_tokens: int) -> None:
        assert num_tokens == self.lengths[slot]

    def note(self, plan: StepPlan) -> None:
        pass

    def observe(self, num_tokens: int) -> Bits:
        raise NotImplementedError

    def note_computed(self, *_: object) -> None:
        pass

    def num_missing(self, *_: object) -> None:
        pass

    def propose(self, rows: DraftRows) -> list[Tokens]:
        self.now_s, self.proposed_s = self.now_s + self.proposing_s, self.proposed_s + self.proposing_s
        found = []
        for length, count in zip(rows.num_tokens.tolist(), rows.counts.tolist(), strict=True):
            drafts = [
                token_at(length + offset) + (self.rng.random() >= self.share) for offset in range(count)
            ]
            found.append(np.array(drafts, np.int32))
        return found

    def admit(self, slot: int) -> None:
        """Compute a prompt."""
        freed = [slot] if self.lengths[slot] else []
        tokens = [token_at(position) for position in range(NUM_PROMPT)]
        row = NewRow(slot, 1, slot, pack_i32(tokens), NUM_PROMPT, SamplingParams(), 0)
        self._step([slot], [0], [NUM_PROMPT], [0], [row], freed)

    def decode(self, *slots: int, lag: int = 0) -> None:
        """Compute a decode step. lag: accepted drafts of each row that the core does not know yet."""
        starts = [self.lengths[slot] - 1 - lag for slot in slots]
        self._step(list(slots), starts, [1] * len(slots), [1 + MOST] * len(slots), [])

    def _step(
        self,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        drafts: list[int],
        new: list[Any],
        freed: Sequence[int] = (),
    ) -> None:
        columns = (pack_i32(slots), pack_i32(starts), pack_i32(counts))
        plan = StepPlan(
            *(1, 0, pack_i32(freed), new, b"", b""),
            *columns,
            pack_u8([1] * len(slots)),
            drafts=pack_u8(drafts),
        )
        self.speculation.end_requests(plan)
        for row in new:
            self.lengths[row.slot] = NUM_PROMPT
        self.speculation.note(plan)
        result = self.speculation.compute(plan, self._compute)
        assert len(result.num_tokens) == len(result.num_drafts) == len(slots)
        assert sum(result.num_tokens) == len(unpack_i32(result.token_ids))
        for slot, num_tokens in zip(slots, result.num_tokens, strict=True):
            self.lengths[slot] += num_tokens

    def _compute(self, plan: StepPlan) -> StepResult:
        starts, counts = unpack_i32(plan.starts), unpack_i32(plan.counts)
        self.starts.append(list(starts))
        self.now_s += self.step_s * (0.9 + 0.1 * sum(counts))
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        draws = [
            range(end - num_draws + 1, end + 1) for end, num_draws in zip(ends, plan.samples, strict=True)
        ]
        return StepResult(1, 0, pack_i32([token_at(position) for row in draws for position in row]))


def test_rows_start_at_the_newest_token_whatever_the_core_knows() -> None:
    simulation, rng = Simulation(0.8), random.Random(1)
    speculation = simulation.speculation
    for slot in range(NUM_SLOTS):
        simulation.admit(slot)
    for _ in range(400):
        is_due = rng.random() < 0.2
        speculation._lengths.is_due = lambda is_due=is_due, **_: is_due  # type: ignore[method-assign]
        if rng.random() < 0.05:
            simulation.admit(rng.randrange(NUM_SLOTS))
        slots = range(NUM_SLOTS) if rng.random() < 0.8 else rng.sample(range(NUM_SLOTS), 2)
        expected = [simulation.lengths[slot] - 1 for slot in slots]
        simulation.decode(*slots, lag=rng.randrange(3))
        assert simulation.starts[-1] == expected


def test_time_of_a_slow_drafter_that_is_never_right_is_limited() -> None:
    simulation = Simulation(0.0, proposing_s=0.05)
    simulation.admit(0)
    for _ in range(3000):
        simulation.decode(0)
    assert 0 < simulation.proposed_s < 0.02 * simulation.now_s
    assert simulation.now_s < 1.02 * 3000 * simulation.step_s


def test_drafts_that_are_right_are_proposed_in_most_steps() -> None:
    simulation = Simulation(0.95, proposing_s=0.001)
    simulation.admit(0)
    while simulation.lengths[0] < 3000:
        simulation.decode(0)
    assert simulation.now_s < 0.5 * 3000 * simulation.step_s


def test_drafter_that_becomes_right_is_found_out() -> None:
    simulation = Simulation(0.0, proposing_s=0.01)
    simulation.admit(0)
    for _ in range(500):
        simulation.decode(0)
    simulation.share, began_s = 0.95, simulation.now_s
    before = simulation.lengths[0]
    while simulation.lengths[0] < before + 3000:
        simulation.decode(0)
    assert simulation.now_s - began_s < 0.8 * 3000 * simulation.step_s
