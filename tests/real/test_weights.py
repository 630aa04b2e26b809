"""Real weights beside transformers in float32 and beside llama.cpp: tokens, log-probabilities, perplexity of a held text."""

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
WORST_RATIO = 0.005
"""Of perplexities; what is allowed beside a reference."""
ALLOWED = {"float32": (4e-3, 2e-3), "bfloat16": (0.3, 0.1)}
"""By dtype, in nats: most by which a drawn token may trail the most likely one, and mean distance of log-probabilities.

Sums in another order, or hidden states rounded to 8 bits."""
DTYPES = tuple(ALLOWED)

pytestmark = pytest.mark.whole


class Said(NamedTuple):
    """What a server said of a model's prompts and of the held text."""

    prompts: list[list[int]]
    drawn: list[list[int]]
    """Greedily, behind each prompt."""
    logprobs: list[np.ndarray]
    """Of what was drawn."""
    held: list[int]
    scores: Scores
    """Of the held text."""

    @property
    def sequences(self) -> list[list[int]]:
        """Prompts with what was drawn, and the held text."""
        pairs = zip(self.prompts, self.drawn, strict=True)
        return [*(prompt + drawn for prompt, drawn in pairs), self.held]


def ask(server: Server) -> Said:
    prompts = [tokens_of(server, text) for text in PROMPTS]
    body = {"max_tokens": NUM_DRAWN, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    drawn, logprobs = [], []
    for prompt in prompts:
        status, told = server.post("/v1/completions", {**body, "prompt": prompt, "return_token_ids": True})
        assert status == 200, told
        drawn.append(told["choices"][0]["token_ids"])
        logprobs.append(np.array(told["choices"][0]["logprobs"]["token_logprobs"]))
    held = tokens_of(server, held_text())[:NUM_SCORED]
    return Said(prompts, drawn, logprobs, held, of_server(server, held))


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def file(request: pytest.FixtureRequest) -> Path:
    path = MODELS[request.param].path
    if not path.is_file():
        pytest.skip(f"{path} is missing; `make real-models` downloads it")
    return path


@pytest.fixture(scope="module")
def said(file: Path) -> dict[str, Said]:
    """By dtype."""
    found = {}
    for dtype in DTYPES:
        flags = ("--dtype", dtype, "--kv-cache-memory", "256MiB", "--max-model-len", "2048")
        with serve(str(file), *flags) as server:
            found[dtype] = ask(server)
    return found


@pytest.fixture(scope="module")
def reference(file: Path, said: dict[str, Said]) -> dict[str, list[Scores]]:
    """Transformers' scores of all that was said, by dtype of the server."""
    scores = of_transformers(file, [ids for each in said.values() for ids in each.sequences])
    count = len(PROMPTS) + 1
    return {dtype: scores[index * count :][:count] for index, dtype in enumerate(said)}


def perplexity(scores: Scores) -> float:
    return float(np.exp(-scores.own.mean()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_tokens_are_the_most_likely_ones_of_transformers(
    said: dict[str, Said], reference: dict[str, list[Scores]], dtype: str
) -> None:
    """But for near ties: what leads there may differ by the error of both."""
    most, mean = ALLOWED[dtype]
    for scores, prompt, logprobs in zip(
        reference[dtype], said[dtype].prompts, said[dtype].logprobs, strict=False
    ):
        own, best = scores.own[len(prompt) - 1 :], scores.best[len(prompt) - 1 :]
        apart = np.abs(own - logprobs)
        print(
            f"{dtype}: lead lost {(best - own).max():.5f}, apart {apart.mean():.5f}, at most {apart.max():.5f}"
        )
        assert (best - own).max() <= most
        assert apart.mean() <= mean


@pytest.mark.parametrize("dtype", DTYPES)
def test_perplexity_is_transformers(
    said: dict[str, Said], reference: dict[str, list[Scores]], dtype: str
) -> None:
    ours, theirs = said[dtype].scores, reference[dtype][-1]
    ratio = perplexity(ours) / perplexity(theirs)
    apart = np.abs(ours.own - theirs.own)
    print(f"{dtype}: perplexity {perplexity(ours):.4f}, ratio {ratio:.5f}, tokens apart {apart.mean():.5f}")
    assert abs(ratio - 1) <= WORST_RATIO
    assert apart.mean() <= ALLOWED[dtype][1]


def test_perplexity_is_llama_cpps(file: Path, said: dict[str, Said]) -> None:
    (theirs,) = of_llama_cpp(file, [said["float32"].held])
    for dtype, each in said.items():
        ratio = perplexity(each.scores) / perplexity(theirs)
        print(f"{dtype}: perplexity {perplexity(each.scores):.4f}, beside llama.cpp {ratio:.5f}")
        assert abs(ratio - 1) <= WORST_RATIO
