"""Log-probabilities of tokens: of a server of ours, of transformers, of llama.cpp."""

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
    """Of each token of a sequence but the first."""

    own: np.ndarray
    """Its log-probability."""
    best: np.ndarray
    """That of the most likely token in its place."""


def tokens_of(server: Server, text: str) -> list[int]:
    """Return a text's tokens, behind those that begin every prompt of the model."""
    status, told = server.post("/tokenize", {"prompt": text})
    assert status == 200, told
    tokens: list[int] = told["tokens"]
    return tokens


def of_server(server: Server, ids: Sequence[int]) -> Scores:
    body = {"prompt": list(ids), "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    status, told = server.post("/v1/completions", body)
    assert status == 200, told
    logprobs = told["choices"][0]["logprobs"]
    best = [max(each.values()) for each in logprobs["top_logprobs"][1 : len(ids)]]
    return Scores(np.array(logprobs["token_logprobs"][1 : len(ids)]), np.array(best))


def of_transformers(file: Path, sequences: Sequence[Sequence[int]]) -> list[Scores]:
    if not TRANSFORMERS.exists():
        pytest.skip(f"{TRANSFORMERS} is missing; `make real-models` makes it")
    return _asked(TRANSFORMERS, "transformers_scores.py", file, sequences)


def of_llama_cpp(file: Path, sequences: Sequence[Sequence[int]]) -> list[Scores]:
    if not LLAMA_CPP.exists():
        pytest.skip("llama.cpp is not installed; `python -m bench.peers install` does it")
    return _asked(LLAMA_CPP, "llama_cpp_scores.py", file, sequences)


def _asked(python: Path, program: str, file: Path, sequences: Sequence[Sequence[int]]) -> list[Scores]:
    asked = json.dumps([str(file), [list(ids) for ids in sequences]])
    done = subprocess.run(
        [python, HERE / program], input=asked, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode == -signal.SIGILL:
        pytest.skip(f"{python} was built for another processor")
    assert done.returncode == 0, done.stderr[-3000:]
    return [Scores(*map(np.array, each)) for each in json.loads(done.stdout.splitlines()[-1])]
