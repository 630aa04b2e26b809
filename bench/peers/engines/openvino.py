"""OpenVINO GenAI's continuous batching pipeline in a driver process, since it has no HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.engines import processes
from bench.peers.engines.driver_process import start_driver
from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.workload import Row

ENVIRONMENT = "openvino"
FORMATS = {"bf16": "fp16", "int8": "int8", "w8a8": "int8", "int4": "int4"}
"""Weight formats of its converter. OpenVINO computes fp16 files in bf16 on processors with bf16 multiplication. It quantizes the
activations of 8-bit weights, so w8a8 has the same file."""


@dataclass(frozen=True, slots=True)
class OpenVino:
    """The package ``openvino-genai``."""

    name: str = "OpenVINO"

    def runs(self, row: Row) -> bool:
        """True except for GGUF files and replicas: a pipeline has one model."""
        return row.precision in FORMATS and row.engines == 1

    def is_installed(self, home: Home) -> bool:
        """True if its environment is installed."""
        return home.python(ENVIRONMENT).exists()

    def versions(self, home: Home) -> dict[str, str]:
        """Return its versions."""
        return processes.installed_versions(home.python(ENVIRONMENT), ("openvino", "openvino-genai"))

    def model_path(self, home: Home, setup: Setup) -> Path:
        """Return the folder of the converted model."""
        return home.folder / "ov" / f"{setup.model}-{FORMATS[setup.precision]}"

    def memory_bytes(self, setup: Setup) -> int:
        """Return the approximate memory of a running engine."""
        return {"S": 4, "M": 7}[setup.model] << 30

    def start(self, home: Home, setup: Setup) -> Running:
        """Start a driver with the converted model of the setup."""
        model = self.model_path(home, setup)
        arguments = [
            *(str(model), "--threads", str(home.threads)),
            *("--max-len", str(home.max_len), "--kv-bytes", str(home.kv_bytes)),
        ]
        python, log = home.python(ENVIRONMENT), home.log(self.name)
        return start_driver(python, "bench.peers.drivers.openvino", arguments, {}, log)
