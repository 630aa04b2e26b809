"""Startup log on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

from tests.deploy.supervisor.supervised import make_config

from quintet.deploy.supervisor.startup_log import PrintedStartupLog


class RecordingTerminal(io.StringIO):
    """Terminal that records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        """Record one write."""
        self.writes.append(text)
        return len(text)


def test_each_line_is_one_write(tmp_path: Path) -> None:
    terminal = RecordingTerminal()
    PrintedStartupLog(make_config(tmp_path), ["Quintet", "Model"], terminal).all_ready()
    assert len(terminal.writes) == 5
    assert all(text.count("\n") == 1 and text.endswith("\n") for text in terminal.writes), terminal.writes
