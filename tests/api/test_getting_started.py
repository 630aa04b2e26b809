"""Python examples of docs/getting-started, run as printed against a server with the embedded model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.server import Server, serve

FOLDER = Path(__file__).parents[2] / "docs" / "getting-started"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(block, id=f"{page.stem} {number}")
    for page in sorted(FOLDER.glob("*.md"))
    for number, block in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--served-model-name", "smollm2") as running:
        yield running


@pytest.mark.whole
@pytest.mark.parametrize("block", BLOCKS)
def test_example_prints_output(block: str, server: Server) -> None:
    code = block.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


def test_pages_have_examples() -> None:
    assert len(BLOCKS) >= 4
