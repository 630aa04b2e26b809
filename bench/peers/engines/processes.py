"""Measure the memory of a process with its descendants, end them, and read versions of installed packages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

_GRACE_S = 40.0
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
_PRINT_VERSIONS = (
    "import json, sys; from importlib.metadata import version;"
    "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its running descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def own_pss_bytes(pid: int) -> int:
    """Return the proportional set size (PSS) of one process: a page shared by N processes counts 1/N."""
    try:
        match = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return 0
    return int(match[1]) * 1024 if match else 0


def pss_bytes(pid: int) -> int:
    """Return the PSS of a process and its descendants."""
    return sum(own_pss_bytes(process.pid) for process in family(pid))


def end(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM to a process, wait for it and its descendants, and kill those that still run."""
    members = family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    _, alive = psutil.wait_procs(members, timeout=2.0)
    for survivor in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    process.wait()


def installed_versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages in the environment of an interpreter."""
    output = subprocess.run(
        [python, "-c", _PRINT_VERSIONS, *packages], check=True, capture_output=True, text=True
    )
    versions = json.loads(output.stdout)
    return {str(name): str(version) for name, version in versions.items()}


def repository_root() -> Path:
    """Return the root of this checkout, the import path of the drivers."""
    return Path(__file__).resolve().parents[3]


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Return the environment variables of a child: ours, offline mode of Hugging Face libraries, and ``extra``."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **extra}
