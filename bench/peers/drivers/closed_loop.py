"""Run a job on an engine inside this process, step by step, with closed-loop clients."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from bench.peers.jobs import Job, JobResult, Served


class Stepper(Protocol):
    """An engine that runs one step of all its requests at a time."""

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        """Add a request, which ends after ``output_len`` tokens."""

    def step(self) -> Iterable[int]:
        """Run a step; return the request of each new token, so that a request with two tokens appears twice."""


def run_closed_loop(job: Job, stepper: Stepper) -> JobResult:
    """Keep ``job.clients`` requests in flight until all have ended; return their times."""
    upcoming = iter(range(len(job.prompts)))
    starts_s: dict[int, float] = {}
    times_s: dict[int, list[float]] = {}
    began_s = time.perf_counter()

    def send() -> bool:
        request = next(upcoming, None)
        if request is None:
            return False
        starts_s[request], times_s[request] = time.perf_counter(), []
        stepper.add(request, job.prompts[request], job.output_lens[request])
        return True

    in_flight = 0
    while in_flight < job.clients and send():
        in_flight += 1
    while in_flight:
        progressed = stepper.step()
        now_s = time.perf_counter()
        for request in progressed:
            times_s[request].append(now_s)
            if len(times_s[request]) == job.output_lens[request] and not send():
                in_flight -= 1
    duration_s = time.perf_counter() - began_s
    served = [Served(starts_s[i], times_s[i], len(times_s[i])) for i in range(len(job.prompts))]
    return JobResult(duration_s, served)
