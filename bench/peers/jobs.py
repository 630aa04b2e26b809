"""Messages between the harness and the drivers: jobs and their results, as lines of JSON.

Drivers run in the environments of other engines, so this module imports only the standard library.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Requests of a closed loop: ``clients`` requests are in flight; the next one is sent when one ends."""

    prompts: list[list[int]]
    output_lens: list[int]
    """Exact number of output tokens of each prompt; EOS is ignored."""
    clients: int
    context_len: int
    """Maximum of prompt plus output tokens, for engines that reserve memory per sequence."""

    @property
    def total_output(self) -> int:
        """Number of output tokens of all requests."""
        return sum(self.output_lens)


@dataclass(frozen=True, slots=True)
class Served:
    """Times of one request, in seconds of a clock that all requests of a result share."""

    start_s: float
    token_times_s: list[float]
    """Arrival of each token; empty if the engine does not stream."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job."""

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
