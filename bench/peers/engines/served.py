"""Run an engine as an HTTP server; send jobs to ``/v1/completions`` as streamed requests with token ids."""

from __future__ import annotations

import itertools
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.engines import processes
from bench.peers.engines.interface import EngineFailed
from bench.peers.jobs import Job, JobResult, Served
from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ask
from quintet.deploy.tools.load_client.load import Load, Outcome, run_load
from quintet.deploy.tools.load_client.workload import Item, RequestShape

MODEL_NAME = "bench"
_POLL_S = 0.02
_BOOT_TIMEOUT_S = 600.0


@dataclass(slots=True)
class ServedEngine:
    """A running server."""

    process: subprocess.Popen[str]
    target: Target
    log: Path

    def run(self, job: Job) -> JobResult:
        """Send the requests of a job with ``job.clients`` clients. Raises `EngineFailed`."""
        shape = RequestShape("/v1/completions", MODEL_NAME, 1, ignore_eos=True)
        bodies = [
            shape.body(Item(prompt, output_len=output_len))
            for prompt, output_len in zip(job.prompts, job.output_lens, strict=True)
        ]
        run = run_load(Load(self.target, shape.endpoint, bodies, job.clients))
        failed = [outcome for outcome in run.outcomes if outcome.failure is not None]
        if failed:
            raise EngineFailed(
                f"{len(failed)} of {len(bodies)} requests failed, the first with {failed[0].failure}: {failed[0].message}"
            )
        # Outcomes are in order of ending; results are in order of requests, which are sent in order.
        by_start = sorted(run.outcomes, key=lambda outcome: outcome.start_s)
        return JobResult(run.end_s - run.start_s, [_served(outcome) for outcome in by_start])

    def pss_bytes(self) -> int:
        """Return the memory (PSS) of all the server's processes."""
        return processes.pss_bytes(self.process.pid)

    def stop(self) -> None:
        """End the server."""
        processes.end(self.process)


def _served(outcome: Outcome) -> Served:
    tally = outcome.tally
    times_s = [
        time_s
        for time_s, num in zip(tally.read_times_s, tally.read_events, strict=True)
        for time_s in itertools.repeat(time_s, num)
    ]
    num_tokens = len(times_s) if tally.usage is None else tally.usage.completion_tokens
    return Served(outcome.start_s, times_s, num_tokens)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(
    command: Sequence[str], port: int, ready_path: str, environment: dict[str, str], log: Path
) -> ServedEngine:
    """Start a server and wait until ``ready_path`` returns 200. Raises `EngineFailed`."""
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            env=processes.child_environment(environment),
        )
    target = Target.parse(f"http://127.0.0.1:{port}")
    engine = ServedEngine(process, target, log)
    deadline_s = time.monotonic() + _BOOT_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise EngineFailed(f"the server ended with status {process.returncode}; see {log}")
        try:
            if ask(target, "GET", ready_path, timeout_s=5.0).status == 200:
                return engine
        except (OSError, TimeoutError):  # not listening yet
            pass
        time.sleep(_POLL_S)
    engine.stop()
    raise EngineFailed(f"the server was not ready after {_BOOT_TIMEOUT_S:.0f} s; see {log}")
