"""Quintet: `quintet serve` over HTTP, or `LLM` for offline rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.peers.engines import processes
from bench.peers.engines.driver_process import start_driver
from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.engines.served import MODEL_NAME, free_port, start_server
from bench.peers.workload import GGUF_FILES, Row

_PACKAGES = ("quintet", "torch", "pyzmq", "msgspec", "uvloop", "uvicorn")


@dataclass(frozen=True, slots=True)
class Quintet:
    """Quintet from this checkout, in the harness's environment."""

    name: str = "Quintet"

    def runs(self, row: Row) -> bool:
        """True for all rows."""
        return True

    def is_installed(self, home: Home) -> bool:
        """Always true."""
        return True

    def versions(self, home: Home) -> dict[str, str]:
        """Return the versions of its main packages."""
        return processes.installed_versions(Path(sys.executable), _PACKAGES)

    def model_path(self, home: Home, setup: Setup) -> Path:
        """Return the folder of safetensors, or the GGUF file."""
        if setup.precision in GGUF_FILES:
            return home.gguf(setup.model, setup.precision)
        return home.model(setup.model)

    def memory_bytes(self, setup: Setup) -> int:
        """Return the approximate memory of a running engine."""
        return {"S": 4, "M": 7, "L": 13, "E": 9}[setup.model] * setup.engines << 30

    def start(self, home: Home, setup: Setup) -> Running:
        """Start a server, or a driver with `LLM` for offline rows."""
        model, quantization = self.model_path(home, setup), _quantization(setup)
        log = home.log(self.name)
        if setup.mode == "offline":
            limits = [
                "--threads",
                str(home.threads),
                "--max-len",
                str(home.max_len),
                "--kv-bytes",
                str(home.kv_bytes),
            ]
            arguments = [str(model), *limits, *quantization]
            return start_driver(Path(sys.executable), "bench.peers.drivers.quintet", arguments, {}, log)
        port = free_port()
        command = [
            *(sys.executable, "-m", "quintet.deploy.cli.main", "serve", str(model)),
            *("--served-model-name", MODEL_NAME, "--port", str(port)),
            *("--data-parallel-size", str(setup.engines), "--threads", str(home.threads // setup.engines)),
            *("--max-model-len", str(home.max_len), "--kv-cache-memory", str(home.kv_bytes)),
            *("--log-level", "WARNING", *quantization, *setup.flags),
        ]
        root = processes.repository_root()
        return start_server(command, port, "/readyz", {"PYTHONPATH": f"{root}:{root / 'src'}"}, log)


def _quantization(setup: Setup) -> list[str]:
    is_file_format = setup.precision in ("bf16", *GGUF_FILES)
    return [] if is_file_format else ["--quantization", setup.precision]
