"""Interfaces of an engine, installed and running."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.peers.jobs import Job, JobResult
from bench.peers.workload import Mode, Precision, Row


@dataclass(frozen=True, slots=True)
class Setup:
    """Start parameters of an engine; jobs that share a setup share a start."""

    model: str
    precision: Precision
    mode: Mode
    engines: int = 1
    """Replicas of the model on one port, which share the threads."""
    flags: tuple[str, ...] = ()
    """Of Quintet: additional arguments."""


@dataclass(frozen=True, slots=True)
class Home:
    """Folders of environments, models and logs, and settings that all starts share."""

    folder: Path
    threads: int
    max_len: int
    kv_bytes: int

    def python(self, environment: str) -> Path:
        """Return the interpreter of one peer's environment."""
        return self.folder / environment / "bin" / "python"

    def model(self, name: str) -> Path:
        """Return the folder of a model as safetensors."""
        return self.folder / "models" / name

    def gguf(self, name: str, precision: Precision) -> Path:
        """Return a model as a GGUF file."""
        return self.folder / "gguf" / f"{name}-{precision}.gguf"

    def log(self, engine: str) -> Path:
        """Return the file that takes what an engine prints."""
        path = self.folder / "logs" / f"run-{engine}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class Running(Protocol):
    """A loaded engine."""

    def run(self, job: Job) -> JobResult:
        """Compute a job. Raises `EngineFailed`."""

    def pss_bytes(self) -> int:
        """Return the memory of all its processes, pages that several share counted once."""

    def stop(self) -> None:
        """End all its processes and wait for them."""


class Contender(Protocol):
    """One of the engines that are compared."""

    @property
    def name(self) -> str:
        """The column of the table."""

    def runs(self, row: Row) -> bool:
        """True if the engine supports the row."""

    def is_installed(self, home: Home) -> bool:
        """True if its environment is installed."""

    def versions(self, home: Home) -> dict[str, str]:
        """Return the versions of the packages that matter."""

    def model_path(self, home: Home, setup: Setup) -> Path:
        """Return the file or folder that a start reads."""

    def memory_bytes(self, setup: Setup) -> int:
        """Return about how much memory a start takes, KV included."""

    def start(self, home: Home, setup: Setup) -> Running:
        """Start and load; return when it can answer. Raises `EngineFailed`."""


class EngineFailed(RuntimeError):
    """An engine did not start, or did not answer; the message says where its log is."""
