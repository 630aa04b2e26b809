"""OpenVINO GenAI's continuous batching pipeline, in the process of a driver: it has no HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.engines import processes
from bench.peers.engines.driven import start_driver
from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.workload import Row

ENVIRONMENT = "openvino"
FORMATS = {"bf16": "fp16", "int8": "int8", "w8a8": "int8", "int4": "int4"}
"""Weight formats of its converter. fp16 files are computed in bf16 where the processor multiplies that; activations of
8-bit weights are quantized as it goes, so w8a8 is the same file."""


@dataclass(frozen=True, slots=True)
class OpenVino:
    """The package ``openvino-genai``."""

    name: str = "OpenVINO"

    def runs(self, row: Row) -> bool:
        """Every row but those of GGUF files and of replicas: a pipeline is one model."""
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
        """Return about how much memory a start takes."""
        return {"S": 4, "M": 7}[setup.model] << 30

    def start(self, home: Home, setup: Setup) -> Running:
        """Start a driver on the converted model of the setup."""
        model = self.model_path(home, setup)
        arguments = [
            *(str(model), "--threads", str(home.threads)),
            *("--max-len", str(home.max_len), "--kv-bytes", str(home.kv_bytes)),
        ]
        python, log = home.python(ENVIRONMENT), home.log(self.name)
        return start_driver(python, "bench.peers.drivers.openvino", arguments, {}, log)
