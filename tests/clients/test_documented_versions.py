"""Versions and dates in docs/clients.md against the pins of the tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.clients.test_packages import HERE, PROGRAMS

ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "clients.md").read_text()
REQUIREMENTS = HERE / "requirements"
AGENTS = ("ai_sdk", "claude_code", "codex", "open_webui")
VERSION = re.compile(r"`([\w@/.-]+)` (\d+(?:\.\d+)+)")
PIN = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)$", re.MULTILINE)


def pins_of(path: Path) -> dict[str, str]:
    """Return the pinned versions of a file by package."""
    if path.suffix == ".json":
        return json.loads(path.read_text())["dependencies"]
    return dict(PIN.findall(path.read_text()))


def test_documented_versions_equal_the_pins() -> None:
    pins = pins_of(ROOT / "constraints.txt")
    for path in REQUIREMENTS.iterdir():
        pins |= pins_of(path)
    documented = dict(VERSION.findall(PAGE))
    assert {"openai", "anthropic"} <= documented.keys()
    assert documented == {name: pins.get(name) for name in documented}


@pytest.mark.parametrize("name", [*PROGRAMS, *AGENTS])
def test_each_tested_program_is_documented(name: str) -> None:
    (path,) = REQUIREMENTS.glob(f"{name}.*")
    documented = dict(VERSION.findall(PAGE))
    assert pins_of(path).keys() & documented.keys(), f"docs/clients.md has none of {path.name}"


def test_each_row_has_the_date_of_its_last_run() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and VERSION.search(line)]
    assert len(rows) >= len(PROGRAMS) + len(AGENTS)
    for row in rows:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.split(" | ")[1]), row
