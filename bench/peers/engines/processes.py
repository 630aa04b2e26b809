"""A child process with all its descendants: weighing them, ending them, asking its interpreter for versions."""

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
_ASK_VERSIONS = (
    "import json, sys; from importlib.metadata import version;"
    "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants that still run."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def own_pss_bytes(pid: int) -> int:
    """Return the proportional set size of one process: its own pages, and its part of those that it shares."""
    try:
        match = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except (FileNotFoundError, ProcessLookupError):  # ended in between
        return 0
    return int(match[1]) * 1024 if match else 0


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process and its descendants."""
    return sum(own_pss_bytes(process.pid) for process in family(pid))


def end(process: subprocess.Popen[str]) -> None:
    """Ask a process to end, wait for its descendants too, and kill what does not."""
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
    """Ask an environment's interpreter for the versions of packages."""
    asked = subprocess.run(
        [python, "-c", _ASK_VERSIONS, *packages], check=True, capture_output=True, text=True
    )
    versions = json.loads(asked.stdout)
    return {str(name): str(version) for name, version in versions.items()}


def repository_root() -> Path:
    """Return the folder that holds ``bench``, for drivers to import it from."""
    return Path(__file__).resolve().parents[3]


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Return the environment of a child: ours, no network, and what the engine needs."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **extra}
