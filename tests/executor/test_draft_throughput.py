"""Throughput with chosen numbers of drafts over that without drafts, in simulated servers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from quintet.executor.speculation.lengths import DraftCosts, DraftLengths, StepCost

MOST, NUM_STEPS = 8, 3000


@dataclass(frozen=True)
class Server:
    """Costs in milliseconds, and requests that follow each other in all slots."""

    base: float = 4.0
    each: float = 0.4
    draft_base: float = 0.0
    draft_each: float = 0.0
    search: float = 0.0
    """Time of asking for the drafts of a row."""
    choice: float = 0.03
    """Time of choosing the numbers of drafts."""
    acceptance: tuple[float, ...] = (0.0,)
    """Acceptance rates, assigned to the requests cyclically."""
    found: float = 1.0
    """Share of the searches that find drafts."""
    num_slots: int = 1
    num_prompt: int = 200
    num_outputs: int = 250
    noise: float = 0.1

    @property
    def plain(self) -> float:
        """Tokens per millisecond without drafts."""
        return self.num_slots / (self.base + self.each * self.num_slots)

    def best(self) -> float:
        """Return the throughput with the best constant number of drafts, over that without drafts."""
        rates = []
        for count in range(MOST + 1):
            sums = [sum(share**depth for depth in range(count + 1)) for share in self.acceptance]
            rows = self.num_slots * (1 + count)
            step = self.base + self.each * rows + (self.draft_base + self.draft_each * self.num_slots) * count
            tokens = len(sums) / sum(1 / each for each in sums)
            if count:
                step += self.num_slots * (
                    self.search + self.draft_each * self.num_prompt * tokens / self.num_outputs
                )
            rates.append(self.num_slots * tokens / step)
        return max(rates) / self.plain

    def ratio(self, num_steps: int = NUM_STEPS) -> float:
        """Return the throughput of chosen numbers of drafts, over that without drafts."""
        return _Run(self).ratio(num_steps)


class _Run:
    def __init__(self, server: Server) -> None:
        self.server, self.rng = server, np.random.default_rng(0)
        self.lengths = DraftLengths(server.num_slots)
        self.slots = np.arange(server.num_slots)
        self.shares, self.num_left = np.zeros(server.num_slots), np.zeros(server.num_slots)
        self.missing = np.zeros(server.num_slots, np.int64)
        self.num_requests = 0
        for slot in self.slots:
            self._begin(slot)
            self.num_left[slot] = 1 + self.rng.integers(server.num_outputs)

    def _begin(self, slot: int) -> None:
        self.lengths.begin(slot)
        self.shares[slot] = self.server.acceptance[self.num_requests % len(self.server.acceptance)]
        self.missing[slot], self.num_left[slot] = self.server.num_prompt, self.server.num_outputs
        self.num_requests += 1

    def _noise(self) -> float:
        return float(self.rng.lognormal(-(self.server.noise**2) / 2, self.server.noise)) / 1e3

    def ratio(self, num_steps: int) -> float:
        server, lengths, num_slots = self.server, self.lengths, self.server.num_slots
        num_tokens, total_s = 0, 0.0
        for _ in range(num_steps):
            counts, overhead, asked = np.zeros(num_slots, np.int64), 0.0, None
            is_due = lengths.is_due()
            lengths.begin_step()
            if is_due:
                overhead += server.choice
                step_time = server.draft_base / 1e3, server.draft_each / 1e3
                asked = lengths.choose(
                    *(self.slots, np.full(num_slots, MOST), num_slots),
                    DraftCosts(step_time, self.missing if server.draft_base else None),
                )
                asked = asked.of_rows(asked.counts > 0) if asked.counts.any() else None
            if asked is not None:
                has_drafts = self.rng.random(len(asked.slots)) < server.found
                lengths.note_found(asked.slots, has_drafts)
                counts[asked.slots] = asked.counts * has_drafts
                overhead += server.search * len(asked.slots) + server.draft_base * int(asked.counts.max())
                overhead += server.draft_each * int(asked.counts.sum() + self.missing[asked.slots].sum())
                self.missing[asked.slots] = 0
            accepted = [
                int(np.append(self.rng.random(n) > p, True).argmax())
                for n, p in zip(counts, self.shares, strict=True)
            ]
            step_tokens = num_slots + int(counts.sum())
            seconds = (server.base + server.each * step_tokens) * self._noise()
            overhead_s = overhead * self._noise()
            for slot in np.flatnonzero(counts).tolist():
                lengths.note(slot, accepted[slot], int(counts[slot]))
            cost = StepCost(step_tokens, seconds, overhead_s, int(counts.sum()), sum(accepted))
            lengths.note_step(self.slots, num_slots, cost, asked)
            num_tokens, total_s = num_tokens + num_slots + sum(accepted), total_s + seconds + overhead_s
            self.missing += np.where(counts > 0, 0, 1)
            self.num_left -= 1 + np.array(accepted)
            for slot in np.flatnonzero(self.num_left <= 0).tolist():
                lengths.end(slot)
                self._begin(slot)
        return num_tokens / total_s / 1e3 / server.plain


NEVER_SLOWER = {
    "draft model as dear as the target": Server(draft_base=3.6, draft_each=0.36, acceptance=(0.9,)),
    "dear draft model, long prompts": Server(
        draft_base=3.0, draft_each=0.3, acceptance=(0.7,), num_prompt=3000
    ),
    "draft model half as dear": Server(draft_base=2.0, draft_each=0.2, acceptance=(0.5,)),
    "cheap draft model of bad acceptance": Server(draft_base=0.4, draft_each=0.04, acceptance=(0.05,)),
    "acceptance at the limit": Server(draft_base=0.4, draft_each=0.04, acceptance=(0.2, 0.25, 0.3)),
    "short requests": Server(
        draft_base=1.0, draft_each=0.2, acceptance=(0.6,), num_prompt=500, num_outputs=10
    ),
    "lookup of wrong tokens": Server(acceptance=(0.02,), search=0.02),
    "lookup without matches": Server(acceptance=(0.5,), search=0.1, found=0.02),
    "slow search": Server(base=0.3, each=0.03, acceptance=(0.3,), search=0.1, found=0.5),
    "tiny model": Server(
        base=0.3, each=0.05, draft_base=0.3, draft_each=0.04, acceptance=(0.7,), choice=0.06
    ),
    "dear tokens": Server(base=0.5, each=3.5, acceptance=(0.5,), search=0.02),
    "noisy times": Server(draft_base=1.6, draft_each=0.2, acceptance=(0.4,), noise=0.5),
}


@pytest.mark.parametrize("num_slots", [1, 8, 32])
@pytest.mark.parametrize("name", NEVER_SLOWER)
def test_drafts_are_never_slower_than_none_by_more_than_two_percent(name: str, num_slots: int) -> None:
    num_steps = NUM_STEPS // (1 if num_slots < 32 else 2)
    assert replace(NEVER_SLOWER[name], num_slots=num_slots).ratio(num_steps) > 0.98


GOOD = {
    "lookup": Server(acceptance=(0.8,), search=0.02),
    "cheap draft model": Server(draft_base=0.4, draft_each=0.04, acceptance=(0.85,)),
    "head": Server(draft_base=0.3, draft_each=0.02, acceptance=(0.7,)),
    "large model": Server(base=30.0, each=0.8, draft_base=3.0, draft_each=0.1, acceptance=(0.75,)),
}


@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("name", GOOD)
def test_good_drafts_are_nearly_as_fast_as_the_best_number(name: str, num_slots: int) -> None:
    server = replace(GOOD[name], num_slots=num_slots)
    assert server.ratio() > 1.0 + 0.8 * (server.best() - 1.0)


def test_good_requests_among_bad_ones_get_drafts() -> None:
    server = Server(search=0.02, acceptance=(0.9, 0.1), num_slots=8)
    alone = replace(server, acceptance=(0.9,))
    assert server.ratio() > 1.0 + 0.3 * (alone.ratio() - 1.0)
