"""``quintet collect-env``: describes the machine and the installation for bug reports."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil

from quintet.deploy.config.memory import available_ram_bytes, format_size
from quintet.wire.errors import ConfigError

_PACKAGES = (
    "quintet", "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "msgspec", "pyzmq",
    "starlette", "uvicorn", "uvloop", "httptools", "numpy", "jinja2", "prometheus-client",
)  # fmt: skip

_CPU_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16"),
)
_ENVIRONMENT = ("HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TMPDIR")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "collect-env",
        description="Describe this machine and installation. Paste the output into a bug report; it contains no secrets.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    description = describe()
    if arguments.json:
        print(json.dumps(description, indent=2))
    else:
        width = max(map(len, description))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in description.items()))
    return 0


def describe() -> dict[str, str]:
    """Return the description: name -> value."""
    cpu = _cpuinfo("model name") or platform.processor() or platform.machine()
    present = set(_cpuinfo("flags", "Features").split())
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cpu": f"{cpu}, {psutil.cpu_count(logical=False)} cores, {psutil.cpu_count()} threads",
        "cpus usable": str(len(os.sched_getaffinity(0))),
        "cpu flags": " ".join(flag for flag in _CPU_FLAGS if flag in present) or "none of the relevant ones",
        "cpu kernels": _kernels(),
        "memory": f"{format_size(psutil.virtual_memory().total)}, {format_size(available_ram_bytes())} available",
        "gpu": _gpus(),
        **{name: _version(name) for name in _PACKAGES},
        **{f"${name}": os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpuinfo(*keys: str) -> str:
    """Return the first value of any of these keys in ``/proc/cpuinfo``."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in keys:
                return value.strip()
    return ""


def _kernels() -> str:
    """Return the instruction set of the compiled kernels on this CPU, and the reason if a better one is unused."""
    from quintet.executor.backends.cpu.ops.host_library import (
        instruction_set,
        instruction_set_refusal,
        open_library,
    )

    try:
        library = open_library()
    except ConfigError as error:
        return str(error)
    if library is None:
        return "not built; torch operators are used"
    refusal = instruction_set_refusal(library)
    return instruction_set(library) + (f" ({refusal})" if refusal else "")


def _gpus() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none (no nvidia-smi)"
    answer = subprocess.run(
        [tool, "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"],
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    return "; ".join(answer.stdout.strip().splitlines()) or "nvidia-smi reports none"
