"""Bounds on the files and lines that a streamed chat request crosses: limits that only go down.

`python -m bench.request_path --list` prints the files. The aim is 75 files and 12,000 lines.
"""

from __future__ import annotations

import pytest
from bench.request_path import file_lines, measure

MAX_FILES = 69
MAX_LINES = 13_500

MAX_MEASUREMENTS = 3
"""On a loaded machine, requests take so long that periodic work falls into each of them."""


def test_a_streamed_chat_request_crosses_few_files() -> None:
    for _ in range(MAX_MEASUREMENTS):
        files = measure().files()
        num_lines = sum(map(file_lines, files))
        if len(files) <= MAX_FILES and num_lines <= MAX_LINES:
            return
    pytest.fail(
        f"{len(files)} files with {num_lines} lines, of {MAX_FILES} and {MAX_LINES}: python -m bench.request_path --list"
    )
