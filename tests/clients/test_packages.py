"""Published client packages against a real server, each in a separate environment.

``make clients`` creates the environments. Folder ``programs`` has a program for each client.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.deploy.embedded import default_model_path
from tests.processes.server import Server, serve

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv" / "clients"
PROGRAMS = sorted(path.stem for path in (HERE / "programs").glob("*.py"))
NEED_CHECKPOINT = {"aiperf", "lm_eval"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--dtype", "float32") as server:
        yield server


@pytest.mark.whole
@pytest.mark.parametrize("name", PROGRAMS)
def test_client_program(name: str, server: Server, tmp_path: Path) -> None:
    python = ENVIRONMENTS / name / "bin" / "python"
    assert python.exists(), f"{python} is missing; `make clients` makes it"
    more = [str(default_model_path())] if name in NEED_CHECKPOINT else []
    command = [python, HERE / "programs" / f"{name}.py", server.url, "quintet-toy", *more]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    assert not [line for line in server.lines if "ERROR" in line or "Traceback" in line]
