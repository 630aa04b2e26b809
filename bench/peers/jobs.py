"""Requests to an engine and its answers: the contract between the harness and the drivers.

Drivers run in the environments of other engines, so this module knows the standard library alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts for a closed loop: ``clients`` of them are in flight, and each that ends is followed by the next."""

    prompts: list[list[int]]
    output_lens: list[int]
    """Tokens to generate for each prompt: exactly as many, whatever is generated."""
    clients: int
    context_len: int
    """Longest prompt plus output, for engines that reserve memory per sequence."""

    @property
    def total_output(self) -> int:
        """Tokens that all requests generate."""
        return sum(self.output_lens)


@dataclass(frozen=True, slots=True)
class Served:
    """One request's times, by a clock that is the same within one result."""

    start_s: float
    token_times_s: list[float]
    """Arrival of each token; empty where the engine answers only at the end."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """A finished job."""

    duration_s: float
    served: list[Served]


def encode_job(job: Job) -> str:
    """Return a job as one line of JSON."""
    return json.dumps(asdict(job))


def decode_job(line: str) -> Job:
    """Return the job of one line of JSON."""
    return Job(**json.loads(line))


def encode_result(result: JobResult) -> str:
    """Return a result as one line of JSON."""
    return json.dumps(asdict(result))


def decode_result(line: str) -> JobResult:
    """Return the result of one line of JSON."""
    fields = json.loads(line)
    return JobResult(fields["duration_s"], [Served(**served) for served in fields["served"]])
