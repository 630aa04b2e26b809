"""Real weights against transformers in float32 and llama.cpp: tokens, log-probabilities, held-out perplexity."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from bench.quantization.texts import held_text

from tests.processes.server import Server, serve
from tests.real.models import MODELS
from tests.real.scores import Scores, of_llama_cpp, of_server, of_transformers, tokens_of

NUM_SCORED = 1024
NUM_DRAWN = 48
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there",
    "Die Hauptstadt von Italien",
)
PERPLEXITY_TOLERANCE = 0.005
"""Relative tolerance of perplexities."""
TOLERANCES = {"float32": (4e-3, 2e-3), "bfloat16": (0.3, 0.1)}
"""dtype -> (largest gap to the most likely token, mean difference of log-probabilities), in nats.

Reasons: another order of sums, and the 8-bit mantissa of hidden states in bfloat16."""
DTYPES = tuple(TOLERANCES)

pytestmark = pytest.mark.whole


class ServerOutput(NamedTuple):
    """A server's greedy outputs and scores."""

    prompts: list[list[int]]
    drawn: list[list[int]]
    """Greedy tokens of each prompt."""
    logprobs: list[np.ndarray]
    """Log-probabilities of these tokens."""
    held_out: list[int]
    scores: Scores
    """Scores of the held-out text."""

    @property
    def sequences(self) -> list[list[int]]:
        """Prompts with their greedy tokens, and the held-out text."""
        pairs = zip(self.prompts, self.drawn, strict=True)
        return [*(prompt + drawn for prompt, drawn in pairs), self.held_out]


def ask(server: Server) -> ServerOutput:
    prompts = [tokens_of(server, text) for text in PROMPTS]
    body = {"max_tokens": NUM_DRAWN, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    drawn, logprobs = [], []
    for prompt in prompts:
        status, answer = server.post("/v1/completions", {**body, "prompt": prompt, "return_token_ids": True})
        assert status == 200, answer
        drawn.append(answer["choices"][0]["token_ids"])
        logprobs.append(np.array(answer["choices"][0]["logprobs"]["token_logprobs"]))
    held_out = tokens_of(server, held_text())[:NUM_SCORED]
    return ServerOutput(prompts, drawn, logprobs, held_out, of_server(server, held_out))


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def file(request: pytest.FixtureRequest) -> Path:
    path = MODELS[request.param].path
    if not path.is_file():
        pytest.skip(f"{path} is missing; run `make real-models`")
    return path


@pytest.fixture(scope="module")
def outputs(file: Path) -> dict[str, ServerOutput]:
    """Outputs of the server by dtype."""
    found = {}
    for dtype in DTYPES:
        flags = ("--dtype", dtype, "--kv-cache-memory", "256MiB", "--max-model-len", "2048")
        with serve(str(file), *flags) as server:
            found[dtype] = ask(server)
    return found


@pytest.fixture(scope="module")
def reference(file: Path, outputs: dict[str, ServerOutput]) -> dict[str, list[Scores]]:
    """Transformers' scores of the outputs, by dtype of the server."""
    scores = of_transformers(file, [ids for each in outputs.values() for ids in each.sequences])
    count = len(PROMPTS) + 1
    return {dtype: scores[index * count :][:count] for index, dtype in enumerate(outputs)}


def perplexity(scores: Scores) -> float:
    return float(np.exp(-scores.own.mean()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_tokens_equal_transformers(
    outputs: dict[str, ServerOutput], reference: dict[str, list[Scores]], dtype: str
) -> None:
    """Except near ties within the tolerance."""
    max_gap, max_mean = TOLERANCES[dtype]
    for scores, prompt, logprobs in zip(
        reference[dtype], outputs[dtype].prompts, outputs[dtype].logprobs, strict=False
    ):
        own, best = scores.own[len(prompt) - 1 :], scores.best[len(prompt) - 1 :]
        difference = np.abs(own - logprobs)
        print(
            f"{dtype}: largest gap {(best - own).max():.5f}, difference {difference.mean():.5f}, at most {difference.max():.5f}"
        )
        assert (best - own).max() <= max_gap
        assert difference.mean() <= max_mean


@pytest.mark.parametrize("dtype", DTYPES)
def test_perplexity_equals_transformers(
    outputs: dict[str, ServerOutput], reference: dict[str, list[Scores]], dtype: str
) -> None:
    ours, theirs = outputs[dtype].scores, reference[dtype][-1]
    ratio = perplexity(ours) / perplexity(theirs)
    difference = np.abs(ours.own - theirs.own)
    print(
        f"{dtype}: perplexity {perplexity(ours):.4f}, ratio {ratio:.5f}, mean difference {difference.mean():.5f}"
    )
    assert abs(ratio - 1) <= PERPLEXITY_TOLERANCE
    assert difference.mean() <= TOLERANCES[dtype][1]


def test_perplexity_equals_llama_cpp(file: Path, outputs: dict[str, ServerOutput]) -> None:
    (theirs,) = of_llama_cpp(file, [outputs["float32"].held_out])
    for dtype, each in outputs.items():
        ratio = perplexity(each.scores) / perplexity(theirs)
        print(f"{dtype}: perplexity {perplexity(each.scores):.4f}, ratio to llama.cpp {ratio:.5f}")
        assert abs(ratio - 1) <= PERPLEXITY_TOLERANCE
