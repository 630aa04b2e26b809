"""llama.cpp beside us: a process that computes steps when asked, and waits otherwise."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench.peers.drivers.lines import READY
from bench.peers.engines import processes
from bench.peers.engines.llamacpp import ENVIRONMENT

FORMATS = ("none", "int8", "int4")
"""Quantizations that it has a format for: q8_0 and q4_0, a scale for each 32 weights."""


def interpreter(home: Path) -> Path | None:
    """Return the Python that has llama.cpp, as ``python -m bench.peers install`` leaves it below ``home``."""
    python = home / ENVIRONMENT / "bin" / "python"
    return python if python.exists() else None


class LlamaCpp:
    """llama.cpp with the model of the config in ``folder``."""

    def __init__(self, python: Path, folder: Path, quantization: str, threads: int, steps: int) -> None:
        """steps: as many as each number of rows is asked for, at most. Raises ValueError where it does not load such a model."""
        root = processes.repository_root()
        self._process = subprocess.Popen(
            [
                *(str(python), "-m", "bench.families.drive_llamacpp", str(folder)),
                *("--quantization", quantization, "--threads", str(threads), "--steps", str(steps)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env=processes.child_environment({"PYTHONPATH": f"{root}:{root / 'src'}"}),
        )
        said = self._line()
        if said != READY:
            self.stop()
            raise ValueError(said or "ended")

    def seconds(self, num_rows: int, context: int, steps: int) -> list[float]:
        """Have steps computed; return what each took. Other ``num_rows`` than before compute ``context`` tokens of each first."""
        assert self._process.stdin is not None
        print(num_rows, context, steps, file=self._process.stdin, flush=True)
        answer: list[float] = json.loads(self._line())
        return answer

    def stop(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        processes.end(self._process)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")
