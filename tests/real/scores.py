"""Log-probabilities of tokens from a server, transformers and llama.cpp."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.clients.test_packages import ENVIRONMENTS
from tests.gguf.vocabularies import LLAMA_CPP
from tests.processes.server import Server

HERE = Path(__file__).parent
TRANSFORMERS = ENVIRONMENTS / "real" / "bin" / "python"


class Scores(NamedTuple):
    """Log-probabilities at each token of a sequence except the first."""

    own: np.ndarray
    """Log-probability of the token."""
    best: np.ndarray
    """Log-probability of the most likely token at this position."""


def tokens_of(server: Server, text: str) -> list[int]:
    """Return a text's tokens, including BOS tokens."""
    status, answer = server.post("/tokenize", {"prompt": text})
    assert status == 200, answer
    tokens: list[int] = answer["tokens"]
    return tokens


def of_server(server: Server, ids: Sequence[int]) -> Scores:
    body = {"prompt": list(ids), "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    status, answer = server.post("/v1/completions", body, timeout_s=300.0)
    assert status == 200, answer
    logprobs = answer["choices"][0]["logprobs"]
    best = [max(each.values()) for each in logprobs["top_logprobs"][1 : len(ids)]]
    return Scores(np.array(logprobs["token_logprobs"][1 : len(ids)]), np.array(best))


def of_transformers(file: Path, sequences: Sequence[Sequence[int]]) -> list[Scores]:
    if not TRANSFORMERS.exists():
        pytest.skip(f"{TRANSFORMERS} is missing; run `make real-models`")
    return _run_program(TRANSFORMERS, "transformers_scores.py", file, sequences)


def of_llama_cpp(file: Path, sequences: Sequence[Sequence[int]]) -> list[Scores]:
    if not LLAMA_CPP.exists():
        pytest.skip("llama.cpp is not installed; run `python -m bench.peers install`")
    return _run_program(LLAMA_CPP, "llama_cpp_scores.py", file, sequences)


def _run_program(python: Path, program: str, file: Path, sequences: Sequence[Sequence[int]]) -> list[Scores]:
    sequences_json = json.dumps([str(file), [list(ids) for ids in sequences]])
    done = subprocess.run(
        [python, HERE / program],
        input=sequences_json,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"{python} requires another processor")
    assert done.returncode == 0, done.stderr[-3000:]
    return [Scores(*map(np.array, each)) for each in json.loads(done.stdout.splitlines()[-1])]
