"""A sampling parameter is spelled in few files. `docs/developers/extending.md` lists them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("wire", "frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc", "csrc")
"""The server's processes. Clients, readers of foreign formats and tests have lists of their own."""
MOST_FILES = 6
PARAMETERS = (
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "include_stop_str_in_output", "repetition_detection", "thinking_token_budget",
)  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_sampling_parameter_touches_at_most_six_files(name: str) -> None:
    found = subprocess.run(
        ["git", "grep", "--name-only", "--perl-regexp", rf"{name}(?![a-z])", "--", *ENGINE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert 2 <= len(found) <= MOST_FILES, found
