"""Client of the driver process that runs decode steps in llama.cpp."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench.peers.drivers.json_lines import READY
from bench.peers.engines import processes
from bench.peers.engines.llamacpp import ENVIRONMENT

FORMATS = ("none", "int8", "int4")
"""Quantizations for which llama.cpp has a format: q8_0 and q4_0, with one scale for 32 weights."""


def interpreter(home: Path) -> Path | None:
    """Return the Python interpreter with llama.cpp that ``python -m bench.peers install`` creates below ``home``."""
    python = home / ENVIRONMENT / "bin" / "python"
    return python if python.exists() else None


class LlamaCpp:
    """A driver process of llama.cpp with the model of the config in ``folder``."""

    def __init__(self, python: Path, folder: Path, quantization: str, threads: int, steps: int) -> None:
        """Start the process. steps: maximum number of steps for each number of rows. Raises ValueError if the load fails."""
        root = processes.repository_root()
        self._process = subprocess.Popen(
            [
                *(str(python), "-m", "bench.families.llamacpp_driver", str(folder)),
                *("--quantization", quantization, "--threads", str(threads), "--steps", str(steps)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env=processes.child_environment({"PYTHONPATH": f"{root}:{root / 'src'}"}),
        )
        status = self._read_line()
        if status != READY:
            self.stop()
            raise ValueError(status or "the driver of llama.cpp ended")

    def step_s(self, num_rows: int, context: int, steps: int) -> list[float]:
        """Run ``steps`` decode steps; return the seconds of each. A change of ``num_rows`` prefills ``context`` tokens first."""
        assert self._process.stdin is not None
        print(num_rows, context, steps, file=self._process.stdin, flush=True)
        answer: list[float] = json.loads(self._read_line())
        return answer

    def stop(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        processes.end(self._process)

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")
