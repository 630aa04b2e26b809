"""Sampling parameters and endpoints are in few files. `docs/developers/extending.md` lists them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from quintet.frontend.routes import ROUTES
from quintet.wire.params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("wire", "frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc", "csrc")
"""The server's processes. Clients, readers of foreign formats and tests have lists of their own."""
DEFINING = {"wire/params.py", "frontend/api/openai/types.py"}
MOST_FILES = 6
MORE_FILES = {
    **dict.fromkeys(("top_p", "top_k"), 9),  # filters of the kernels, named by three APIs
    "logprob_token_ids": 8,  # each API has another field beside it
    "min_tokens": 8,  # acts in the core, the sampler, the detokenizer and on deadlines
    "skip_special_tokens": 9,  # tokenizers have an argument of this name
    "structured_outputs": 12,  # a feature: several names in the APIs, compiled by the tokenizer
    "truncate_prompt_tokens": 15,  # shortens prompts of each API, which rejects it where it has no prompt
    "truncation_side": 7,  # also a field of pooling
}
"""Parameters with another limit, which only goes down."""
COMMON_WORDS = {
    "n": 20,  # the number of choices of a request: its load, limits and answers
    "temperature": 4,
    "seed": 5,
    "stop": 4,
    "max_tokens": 9,  # load, limits and defaults of each API
    "logprobs": 10,  # results of every process and API
    "prompt_logprobs": 8,  # the same
    "detokenize": 3,
}
"""Names that are common words, with their limits: only the files that read them from parameters count."""


SPECIAL = {"frontend/http/auth.py", "frontend/resume/endpoints.py"}
"""Lists of paths without a key, and of resumable streams."""


def files_with(pattern: str, *folders: str) -> set[str]:
    """Return the tracked files that match a regular expression."""
    command = ["git", "grep", "--name-only", "--perl-regexp", pattern, "--", *folders]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_a_sampling_parameter_touches_at_most_six_files(name: str) -> None:
    """A new parameter has no other limit: find out what spreads it."""
    if name in COMMON_WORDS:
        found = files_with(rf"params\.{name}(?!\w)", *ENGINE) | DEFINING
    else:
        found = files_with(rf"{name}(?![a-z])", *ENGINE)
    assert 2 <= len(found) <= (COMMON_WORDS | MORE_FILES).get(name, MOST_FILES), found


@pytest.mark.parametrize("path", [row.path for row in ROUTES])
def test_the_path_of_an_endpoint_is_only_in_the_route_table(path: str) -> None:
    """With its handler and the types of its API, an endpoint touches three files."""
    assert files_with(re.escape(f'"{path}"'), "frontend") - SPECIAL == {"frontend/routes.py"}
