"""A conversation-like load: lengths of prompts and answers spread as those of ShareGPT are said to be.

Both are log-normal, a common fit for lengths of human text. Their means, 161 tokens in and 338 out, are about what is
commonly given for ShareGPT (a load made popular by Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention", SOSP 2023); the spreads (sigma of the logarithm: 1.1 and 0.8) are ours, and so are the cuts, 4 to
2,048 and 4 to 1,024. Ids are drawn evenly from the vocabulary: no two prompts begin alike, so that prefix caching has
nothing to do.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal spread of lengths."""

    mean: float
    """Before the cut."""
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(self.most, max(self.least, round(rng.lognormvariate(mu, self.sigma))))


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: list[int]
    output_len: int


class Work(StrEnum):
    """Requests of a workload."""

    CONVERSATION = "conversation"
    """As above."""
    FIXED = "fixed"
    """Prompts as above, and 128 output tokens each: what a library without per-request lengths can do too."""


SPREADS = {
    (Work.CONVERSATION, "cuda"): (Lengths(161, 1.1, 4, 2048), Lengths(338, 0.8, 4, 1024)),
    (Work.FIXED, "cuda"): (Lengths(161, 1.1, 4, 1024), Lengths(128, 0.0, 128, 128)),
    (Work.CONVERSATION, "cpu"): (Lengths(12, 0.5, 4, 32), Lengths(6, 0.5, 2, 12)),
    (Work.FIXED, "cpu"): (Lengths(12, 0.5, 4, 32), Lengths(8, 0.0, 8, 8)),
}
"""By device: on a CPU, toys that debug what a GPU is measured with."""


def requests(work: Work, device: str, num: int, vocab_size: int, seed: int) -> list[Asked]:
    """Return ``num`` requests; the same seed gives the same ones."""
    rng = random.Random(seed)
    inputs, outputs = SPREADS[work, device]
    return [
        Asked([rng.randrange(vocab_size) for _ in range(inputs.draw(rng))], outputs.draw(rng))
        for _ in range(num)
    ]
