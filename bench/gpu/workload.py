"""Random requests with ShareGPT-like lengths of prompts and outputs.

Lengths are log-normal, a common fit for human text. Their means, 161 prompt tokens and 338 output tokens, are the usual ones of
ShareGPT. Source of this load: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023. The standard deviations of the logarithm (1.1 and 0.8) and the limits (4 to 2,048 and 4 to 1,024) are our choice. Token
ids are uniform over the vocabulary, so that prompts have no common prefixes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of lengths with limits."""

    mean: float
    """Mean before the limits apply."""
    sigma: float
    minimum: int
    maximum: int

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(self.maximum, max(self.minimum, round(rng.lognormvariate(mu, self.sigma))))


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request of the workload."""

    prompt: list[int]
    output_len: int


class Work(StrEnum):
    """Kind of workload."""

    CONVERSATION = "conversation"
    """ShareGPT-like prompt and output lengths."""
    FIXED = "fixed"
    """ShareGPT-like prompt lengths and 128 output tokens, for libraries without output lengths per request."""


DISTRIBUTIONS = {
    (Work.CONVERSATION, "cuda"): (Lengths(161, 1.1, 4, 2048), Lengths(338, 0.8, 4, 1024)),
    (Work.FIXED, "cuda"): (Lengths(161, 1.1, 4, 1024), Lengths(128, 0.0, 128, 128)),
    (Work.CONVERSATION, "cpu"): (Lengths(12, 0.5, 4, 32), Lengths(6, 0.5, 2, 12)),
    (Work.FIXED, "cpu"): (Lengths(12, 0.5, 4, 32), Lengths(8, 0.0, 8, 8)),
}
"""Distributions of prompt and output lengths, by workload and device; those of a CPU are toys for tests."""


def requests(work: Work, device: str, num: int, vocab_size: int, seed: int) -> list[WorkloadRequest]:
    """Return ``num`` requests; the same seed gives the same ones."""
    rng = random.Random(seed)
    inputs, outputs = DISTRIBUTIONS[work, device]
    return [
        WorkloadRequest([rng.randrange(vocab_size) for _ in range(inputs.draw(rng))], outputs.draw(rng))
        for _ in range(num)
    ]
