"""llama.cpp by llama-cpp-python in a driver process, since its Python server runs one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.engines import processes
from bench.peers.engines.driver_process import start_driver
from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.workload import Precision, Row

ENVIRONMENT = "llamacpp"
_FORMATS: dict[Precision, Precision] = {"int8": "q8_0", "w8a8": "q8_0", "int4": "q4_0"}
"""GGUF formats for rows in other formats. llama.cpp quantizes the activations of 8-bit weights to 8 bits."""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """The package ``llama-cpp-python``, compiled here for this processor."""

    name: str = "llama.cpp"

    def runs(self, row: Row) -> bool:
        """True except for replicas and the shared prefix: the C API has no prefix cache."""
        return row.pattern != "prefix" and row.engines == 1

    def is_installed(self, home: Home) -> bool:
        """True if its environment is installed."""
        return home.python(ENVIRONMENT).exists()

    def versions(self, home: Home) -> dict[str, str]:
        """Return its version."""
        return processes.installed_versions(home.python(ENVIRONMENT), ("llama-cpp-python",))

    def model_path(self, home: Home, setup: Setup) -> Path:
        """Return the GGUF file."""
        return home.gguf(setup.model, _FORMATS.get(setup.precision, setup.precision))

    def memory_bytes(self, setup: Setup) -> int:
        """Return the approximate memory of a running engine."""
        return {"S": 3, "M": 5, "L": 12, "E": 8}[setup.model] << 30

    def start(self, home: Home, setup: Setup) -> Running:
        """Start a driver with the GGUF file of the setup."""
        model = self.model_path(home, setup)
        arguments = [
            *(str(model), "--threads", str(home.threads)),
            *("--max-len", str(home.max_len), "--kv-bytes", str(home.kv_bytes)),
        ]
        python, log = home.python(ENVIRONMENT), home.log(self.name)
        return start_driver(python, "bench.peers.drivers.llamacpp", arguments, {}, log)
