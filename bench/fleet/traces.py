"""Requests in the shape of published traces, drawn from a seed: when each comes, what it shares with others, how long it is.

A conversation begins with a shared prompt (a system prompt, a tool) and its own text. Each later turn sends
all of that, the answer to it, and something new. What was published of a trace are means and the share of prompts that an
unbounded cache would find; the distributions are fitted to those: lognormal lengths, geometric numbers of turns, shared prompts
by Zipf's law, and conversations that begin in bursts, with gaps of a gamma distribution.

mooncake-tool, mooncake-chat  Qin et al., Mooncake, FAST 2025, the table of workloads: tool & agent 8 596 tokens in, 182 out, 59 %
                              found; conversation 12 035 in, 343 out, 40 %.
azure-chat                    Patel et al., Splitwise, ISCA 2024: conversation, medians of 1 020 tokens in and 129 out. Nothing
                              is published of what its prompts share; here, nothing.
bursts                        Wang et al., BurstGPT, KDD 2025, fits gaps with gamma distributions; the shape, 0.5, is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BURST_SHAPE = 0.5
"""Of the gamma distribution of gaps; 1 is Poisson."""
OUTPUT_SPREAD = 1.0
MAX_TURNS = 16
EARLIER = 5
"""Conversations begin so many mean pauses before the trace does; what they asked until then is not in it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Targets of a fitted trace; lengths in tokens."""

    num_shared: int
    """Prompts that conversations begin with."""
    shared: float
    """Their mean length; 0 for none."""
    first: float
    """Mean length of what a conversation's first request has of its own."""
    later: float
    """Mean length of what each later one adds."""
    output: float
    turns: float
    """Mean number of requests of a conversation."""
    spread: float = 1.0
    """Standard deviation of the logarithm of prompts' lengths."""
    think_s: float = 30.0
    """Mean from a request to the conversation's next."""


SHAPES = {
    "mooncake-tool": Shape(1000, 3900, 3500, 3000, 182, 1.35),
    "mooncake-chat": Shape(200, 500, 8700, 5400, 343, 1.7),
    "azure-chat": Shape(1, 0, 1155, 1155, 211, 1.0, spread=0.5),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they come, a column for each thing. ``[num_requests]``."""

    arrival_s: Floats
    conversation: Ints
    shared: Ints
    """Index of the shared prompt that it begins with."""
    num_shared: Ints
    """Tokens of that."""
    num_own: Ints
    """Tokens after them."""
    num_known: Ints
    """Of those, tokens that the conversation's last request had, with its answer: all of them can be found."""
    num_output: Ints
    answers: tuple[tuple[tuple[int, int], ...], ...]
    """Of each request, where in its own tokens earlier answers lie: begin and end."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def ideal(self) -> Ints:
        """Return the tokens of each prompt that one unbounded cache of the whole fleet would find."""
        _, first = np.unique(self.shared, return_index=True)
        is_new = np.zeros(len(self), dtype=bool)
        is_new[first] = True
        return self.num_known + np.where(is_new, 0, self.num_shared)


def draw(shape: Shape, num_requests: int, rate: float, seed: int, grain: int = 1) -> Trace:
    """Draw a trace of so many requests, ``rate`` a second on average, every length a multiple of ``grain`` tokens."""
    rng = np.random.default_rng(seed)
    before_s = (
        EARLIER * shape.think_s if shape.turns > 1 else 0.0
    )  # so that as many are at their end as at their beginning
    num_conversations = math.ceil(1.2 * (num_requests + rate * before_s) / shape.turns) + 64
    gaps = rng.gamma(BURST_SHAPE, shape.turns / (rate * BURST_SHAPE), num_conversations)
    begin_s = np.cumsum(gaps) - before_s
    num_turns = np.minimum(rng.geometric(1 / shape.turns, num_conversations), MAX_TURNS)
    weights = 1.0 / np.arange(1, shape.num_shared + 1)
    shared = rng.choice(shape.num_shared, num_conversations, p=weights / weights.sum())
    lengths = _lengths(rng, shape.shared, 0.5, shape.num_shared, grain)
    answers: list[tuple[tuple[int, int], ...]] = [()] * num_conversations
    rows: list[tuple[float, int, int, int, int, tuple[tuple[int, int], ...]]] = []
    for turn in range(int(num_turns.max())):
        alive = np.flatnonzero(num_turns > turn)
        new = _lengths(rng, shape.later if turn else shape.first, shape.spread, len(alive), grain)
        output = _lengths(rng, shape.output, OUTPUT_SPREAD, len(alive), grain)
        if turn == 0:
            own, known = np.zeros(num_conversations, np.int64), np.zeros(num_conversations, np.int64)
            at_s = begin_s.copy()
        else:
            at_s[alive] += rng.exponential(shape.think_s, len(alive))
        own[alive] += new
        for place, added in zip(alive.tolist(), output.tolist(), strict=True):
            size = int(own[place])
            rows.append((float(at_s[place]), place, size, int(known[place]), added, answers[place]))
            answers[place] = (*answers[place], (size, size + added))
        own[alive] += output
        known[alive] = own[alive]
    rows = sorted(row for row in rows if row[0] >= 0)[:num_requests]
    arrival_s, places, sizes, knowns, outputs, spans = zip(*rows, strict=True)
    which = shared[list(places)]
    known = np.array(knowns)
    known[np.unique(np.array(places), return_index=True)[1]] = 0  # before the trace no engine has KV
    return Trace(
        np.array(arrival_s), np.array(places), which, lengths[which], np.array(sizes), known, np.array(outputs), spans
    )  # fmt: skip


def _lengths(rng: np.random.Generator, mean: float, spread: float, count: int, grain: int) -> Ints:
    """Draw lognormal lengths of this mean, whole grains, at least one; zeros where the mean is 0."""
    if not mean:
        return np.zeros(count, np.int64)
    lengths = rng.lognormal(math.log(mean) - spread * spread / 2, spread, count)
    return np.maximum(1, np.rint(np.minimum(lengths, 24 * 1024) / grain)).astype(np.int64) * grain
