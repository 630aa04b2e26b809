"""Published platform packages with their integrations, each in a separate environment.

``make clients`` creates the environments. A file in ``platforms`` begins with the name of its environment.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.test_packages import ENVIRONMENTS, HERE
from tests.processes.server import Server, serve

OTHERS = {"installed_packages"}
"""Programs with a target of their own: `make dist-check`."""
PROGRAMS = sorted({path.stem for path in (HERE / "platforms").glob("*.py")} - OTHERS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--kv-cache-memory", "64MiB") as server:
        yield server


@pytest.mark.whole
@pytest.mark.parametrize("name", PROGRAMS)
def test_platform_program(name: str, server: Server, tmp_path: Path) -> None:
    python = ENVIRONMENTS / name.partition("_")[0] / "bin" / "python"
    assert python.exists(), f"{python} is missing; `make clients` makes it"
    command = [python, HERE / "platforms" / f"{name}.py", server.url, "quintet-toy"]
    printed = tmp_path / "printed"
    with printed.open("w") as output:
        status = subprocess.run(
            ["timeout", "900", *command], stdout=output, stderr=output, cwd=tmp_path, check=False
        ).returncode
    assert status == 0, f"status {status} (124: time limit)\n{printed.read_text()[-8000:]}"
