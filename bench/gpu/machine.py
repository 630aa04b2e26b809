"""Describe the machine, packages and commit of a checklist run, and find missing packages.

The device is queried in a separate process, so that the checklist's process does not hold it during the rows.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = (
    "torch",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "transformers",
    "numpy",
    "msgspec",
    "pyzmq",
    "pytest",
    "flashinfer-python",
)

_DEVICE = """
import json, torch
found = {"cuda": torch.version.cuda, "available": torch.cuda.is_available(), "gpus": torch.cuda.device_count()}
if found["available"]:
    facts = torch.cuda.get_device_properties(0)
    found |= {"gpu": facts.name, "multiprocessors": facts.multi_processor_count, "memory_bytes": facts.total_memory,
              "capability": f"{facts.major}.{facts.minor}"}
print(json.dumps(found))
"""


def environment() -> dict[str, str]:
    """Return the environment variables of a row's process, with this checkout on the import path."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


DISTRIBUTIONS = {
    "cupy": "cupy-cuda13x (or -cuda12x)",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Package names of modules with another name."""


def missing_packages(modules: Iterable[str]) -> list[str]:
    """Return the package names of the modules that are not installed."""
    return [
        DISTRIBUTIONS.get(module, module) for module in modules if importlib.util.find_spec(module) is None
    ]


def describe_device() -> dict[str, object]:
    """Return torch's description of the device; ``available`` is False without torch or without a device."""
    ran = subprocess.run(
        [sys.executable, "-c", _DEVICE], env=environment(), capture_output=True, text=True, check=False
    )
    if ran.returncode:
        return {"available": False, "error": (ran.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, object] = json.loads(ran.stdout)
    return found | {"driver": driver_version()}


def driver_version() -> str:
    """Return the NVIDIA driver's version from `nvidia-smi`, or the reason why it is unknown."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return f"unknown: nvidia-smi: {error.strerror}"
    return ran.stdout.strip().splitlines()[0] if ran.stdout.strip() else "unknown: no output of nvidia-smi"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the figures."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of this checkout, with a plus sign if there are uncommitted changes."""

    def git(*words: str) -> str:
        try:
            ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return ran.stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return "unknown: no git"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
