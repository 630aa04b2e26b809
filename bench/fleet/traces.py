"""Random traces fitted to published ones: arrival times, shared prefixes and lengths of requests.

A conversation begins with a shared prefix (system prompt, tools) and its own text. Each later turn sends all of that, the
response, and new text. The distributions are fitted to published means and hit rates of an unbounded cache: lognormal lengths,
geometric numbers of turns, Zipf-distributed shared prefixes, and gamma-distributed gaps between the starts of conversations.

mooncake-tool, mooncake-chat  Qin et al., Mooncake, FAST 2025, table of workloads. Tool & agent: 8 596 prompt tokens, 182 output
                              tokens, 59 % hits. Conversation: 12 035 prompt tokens, 343 output tokens, 40 % hits.
azure-chat                    Patel et al., Splitwise, ISCA 2024, conversation: medians of 1 020 prompt and 129 output tokens.
Shared
                              prefixes are not published; the trace has none.
bursts                        Wang et al., BurstGPT, KDD 2025: gamma-distributed gaps. The shape of 0.5 is our choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BURST_SHAPE = 0.5
"""Shape of the gamma distribution of gaps; 1 is a Poisson process."""
OUTPUT_SPREAD = 1.0
MAX_TURNS = 16
LEAD_PAUSES = 5
"""Conversations begin up to this many mean pauses before the trace. Requests before the trace are left out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a fitted trace; lengths in tokens."""

    num_shared: int
    """Number of shared prefixes."""
    shared: float
    """Mean length of shared prefixes; 0: none."""
    first: float
    """Mean length of the first request's own text."""
    later: float
    """Mean length of the new text of a later request."""
    output: float
    turns: float
    """Mean number of requests of a conversation."""
    spread: float = 1.0
    """Standard deviation of the logarithm of prompt lengths."""
    think_s: float = 30.0
    """Mean time between two requests of a conversation."""


SHAPES = {
    "mooncake-tool": Shape(1000, 3900, 3500, 3000, 182, 1.35),
    "mooncake-chat": Shape(200, 500, 8700, 5400, 343, 1.7),
    "azure-chat": Shape(1, 0, 1155, 1155, 211, 1.0, spread=0.5),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, as columns ``[num_requests]``."""

    arrival_s: Floats
    conversation: Ints
    shared: Ints
    """Index of the shared prefix."""
    num_shared: Ints
    """Tokens of the shared prefix."""
    num_own: Ints
    """Prompt tokens after the shared prefix."""
    num_known: Ints
    """Tokens of ``num_own`` that the conversation's previous request and its response had, so that a cache may have them."""
    num_output: Ints
    answers: tuple[tuple[tuple[int, int], ...], ...]
    """Ranges (begin, end) of earlier responses in the own tokens of each request."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def ideal(self) -> Ints:
        """Return the prompt tokens of each request that hit one unbounded cache of the whole fleet."""
        _, first = np.unique(self.shared, return_index=True)
        is_new = np.zeros(len(self), dtype=bool)
        is_new[first] = True
        return self.num_known + np.where(is_new, 0, self.num_shared)


def draw(shape: Shape, num_requests: int, rate: float, seed: int, grain: int = 1) -> Trace:
    """Draw a trace with a mean of ``rate`` requests per second; lengths are multiples of ``grain`` tokens."""
    rng = np.random.default_rng(seed)
    # Conversations that began earlier give the trace a steady state from its start.
    before_s = LEAD_PAUSES * shape.think_s if shape.turns > 1 else 0.0
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
        for each, num_output in zip(alive.tolist(), output.tolist(), strict=True):
            size = int(own[each])
            rows.append((float(at_s[each]), each, size, int(known[each]), num_output, answers[each]))
            answers[each] = (*answers[each], (size, size + num_output))
        own[alive] += output
        known[alive] = own[alive]
    rows = sorted(row for row in rows if row[0] >= 0)[:num_requests]
    arrival_s, conversations, sizes, knowns, outputs, spans = zip(*rows, strict=True)
    shared_index = shared[list(conversations)]
    known = np.array(knowns)
    first_of_conversation = np.unique(np.array(conversations), return_index=True)[1]
    known[first_of_conversation] = 0  # no engine has KV of requests before the trace
    return Trace(
        np.array(arrival_s), np.array(conversations), shared_index, lengths[shared_index], np.array(sizes), known,
        np.array(outputs), spans,
    )  # fmt: skip


def _lengths(rng: np.random.Generator, mean: float, spread: float, count: int, grain: int) -> Ints:
    """Draw lognormal lengths with this mean, in whole grains and at least one grain; zeros if the mean is 0."""
    if not mean:
        return np.zeros(count, np.int64)
    lengths = rng.lognormal(math.log(mean) - spread * spread / 2, spread, count)
    return np.maximum(1, np.rint(np.minimum(lengths, 24 * 1024) / grain)).astype(np.int64) * grain
