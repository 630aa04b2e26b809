"""Run an engine in a driver process: jobs on its stdin, results on its stdout."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.drivers.json_lines import READY
from bench.peers.engines import processes
from bench.peers.engines.interface import EngineFailed
from bench.peers.jobs import Job, JobResult, decode_result, encode_job


@dataclass(slots=True)
class DriverProcess:
    """A running driver process."""

    process: subprocess.Popen[str]
    log: Path

    def run(self, job: Job) -> JobResult:
        """Send a job and wait for its result. Raises `EngineFailed`."""
        assert self.process.stdin is not None
        try:
            print(encode_job(job), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineFailed(f"the driver has ended; see {self.log}") from None
        return decode_result(self._read_line())

    def pss_bytes(self) -> int:
        """Return the memory (PSS) of the driver and its descendants."""
        return processes.pss_bytes(self.process.pid)

    def stop(self) -> None:
        """Close the driver's stdin and end it."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        processes.end(self.process)

    def wait_ready(self) -> None:
        """Wait for the driver's first line. Raises `EngineFailed`."""
        line = self._read_line()
        if line != READY:
            raise EngineFailed(f"the driver printed {line!r} instead of {READY!r}; see {self.log}")

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EngineFailed(f"the driver ended with status {self.process.wait()}; see {self.log}")
        return line.rstrip("\n")


def start_driver(
    python: Path, module: str, arguments: Sequence[str], environment: dict[str, str], log: Path
) -> DriverProcess:
    """Start ``python -m module`` with this checkout on its import path, and wait until it is ready."""
    root = processes.repository_root()
    paths = f"{root}:{root / 'src'}"
    with log.open("a") as errors:
        process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            env=processes.child_environment({"PYTHONPATH": paths, **environment}),
        )
    driver = DriverProcess(process, log)
    try:
        driver.wait_ready()
    except EngineFailed:
        driver.stop()
        raise
    return driver
