"""The boot story as the terminal gets it."""

from __future__ import annotations

import io
from pathlib import Path

from tests.deploy.supervisor.supervised import make_config

from quintet.deploy.supervisor.startup_log import PrintedStartupLog


class Pieces(io.StringIO):
    """A terminal that keeps what each write brought."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, piece: str) -> int:
        """Keep one piece."""
        self.pieces.append(piece)
        return len(piece)


def test_a_line_is_written_whole_so_that_no_childs_log_comes_in_between(tmp_path: Path) -> None:
    terminal = Pieces()
    PrintedStartupLog(make_config(tmp_path), ["Quintet", "Model"], terminal).all_ready()
    assert len(terminal.pieces) == 5
    assert all(piece.count("\n") == 1 and piece.endswith("\n") for piece in terminal.pieces), terminal.pieces
