"""Sampling parameters and endpoints are in few files. `docs/developers/extending.md` lists them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from quintet.frontend.routes import ROUTES

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("wire", "frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc", "csrc")
"""The server's processes. Clients, readers of foreign formats and tests have lists of their own."""
MOST_FILES = 6
PARAMETERS = (
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "include_stop_str_in_output", "repetition_detection",
)  # fmt: skip


SPECIAL = {"frontend/http/auth.py", "frontend/resume/endpoints.py"}
"""Lists of paths without a key, and of resumable streams."""


def files_with(pattern: str, *folders: str) -> set[str]:
    """Return the tracked files that match a regular expression."""
    command = ["git", "grep", "--name-only", "--perl-regexp", pattern, "--", *folders]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_sampling_parameter_touches_at_most_six_files(name: str) -> None:
    found = files_with(rf"{name}(?![a-z])", *ENGINE)
    assert 2 <= len(found) <= MOST_FILES, found


@pytest.mark.parametrize("path", [row.path for row in ROUTES])
def test_the_path_of_an_endpoint_is_only_in_the_route_table(path: str) -> None:
    """With its handler and the types of its API, an endpoint touches three files."""
    assert files_with(re.escape(f'"{path}"'), "frontend") - SPECIAL == {"frontend/routes.py"}
