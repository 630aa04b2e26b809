"""Interfaces of an engine, installed and running."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.peers.jobs import Job, JobResult
from bench.peers.workload import Mode, Precision, Row


@dataclass(frozen=True, slots=True)
class Setup:
    """Start parameters of an engine; jobs with the same setup use the same process."""

    model: str
    precision: Precision
    mode: Mode
    engines: int = 1
    """Replicas of the model on one port, which share the threads."""
    flags: tuple[str, ...] = ()
    """Additional arguments of Quintet."""


@dataclass(frozen=True, slots=True)
class Home:
    """Folders of environments, models and logs, and settings that are common to all starts."""

    folder: Path
    threads: int
    max_len: int
    kv_bytes: int

    def python(self, environment: str) -> Path:
        """Return the interpreter of an engine's environment."""
        return self.folder / environment / "bin" / "python"

    def model(self, name: str) -> Path:
        """Return the folder of a safetensors model."""
        return self.folder / "models" / name

    def gguf(self, name: str, precision: Precision) -> Path:
        """Return the GGUF file of a model."""
        return self.folder / "gguf" / f"{name}-{precision}.gguf"

    def log(self, engine: str) -> Path:
        """Return the log file of an engine."""
        path = self.folder / "logs" / f"run-{engine}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class Running(Protocol):
    """A loaded engine."""

    def run(self, job: Job) -> JobResult:
        """Run a job. Raises `EngineFailed`."""

    def pss_bytes(self) -> int:
        """Return the memory (PSS) of all its processes."""

    def stop(self) -> None:
        """End all its processes and wait for them."""


class Contender(Protocol):
    """An engine of the comparison."""

    @property
    def name(self) -> str:
        """Name, also the head of its column in the table."""

    def runs(self, row: Row) -> bool:
        """True if the engine supports the row."""

    def is_installed(self, home: Home) -> bool:
        """True if its environment is installed."""

    def versions(self, home: Home) -> dict[str, str]:
        """Return the versions of its main packages."""

    def model_path(self, home: Home, setup: Setup) -> Path:
        """Return the file or folder that a start reads."""

    def memory_bytes(self, setup: Setup) -> int:
        """Return the approximate memory of a running engine, including KV."""

    def start(self, home: Home, setup: Setup) -> Running:
        """Start the engine and wait until it is ready. Raises `EngineFailed`."""


class EngineFailed(RuntimeError):
    """An engine did not start or did not respond; the message names its log."""
