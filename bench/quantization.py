"""What quantization costs the embedded model: held-out loss, and how often its greedy choice stays the same.

The text is the library files that were kept from the model when it was trained (``bench.embedded.corpus``), read in windows
through the Python API: the same kernels, processes and steps as any request. Losses of two rows may be compared with each
other, not with a larger model's: the smaller a model, the more a lost bit hurts it.

    python -m bench.quantization [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.embedded.corpus import Kind, build_corpus
from quintet import LLM, SamplingParams
from quintet.deploy.embedded import default_model_path
from quintet.deploy.python_api.outputs import Position

END_OF_TEXT = 0
WINDOW = 512
"""Tokens of a window, which begins with the end-of-text token as documents did in training."""
SEED = 5
"""The seed of the training run; it only picks the wording of chats, which are not read here."""

VARIANTS: Mapping[str, Mapping[str, str]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "w8a8": {"quantization": "w8a8"},
    "int4": {"quantization": "int4"},
    "bf16, int8 KV": {"kv_cache_dtype": "int8"},
    "int4, int8 KV": {"quantization": "int4", "kv_cache_dtype": "int8"},
}


@dataclass(frozen=True, slots=True)
class Score:
    """One variant over the held-out text."""

    name: str
    nats_per_token: float
    same_choice: float
    """Share of positions whose most likely token is that of bf16."""
    num_tokens: int


def windows(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the held-out text in windows."""
    for document in build_corpus(SEED):
        if document.held_out and document.kind is Kind.LIBRARY:
            ids = tokenizer.encode(document.text).ids
            for begin in range(0, len(ids), WINDOW - 1):
                yield [END_OF_TEXT, *ids[begin : begin + WINDOW - 1]]


def read(prompts: list[list[int]], options: Mapping[str, object]) -> tuple[list[float], list[int]]:
    """Return the log-probability of every token of the prompts and the most likely token at its place."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    logprobs, choices = [], []
    with LLM(None, **options) as llm:
        for output in llm.generate(prompts, asked, use_tqdm=False):
            for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True):
                if position is not None:
                    logprobs.append(position[token_id].logprob)
                    choices.append(most_likely(position))
    return logprobs, choices


def most_likely(position: Position) -> int:
    """Return the first-ranked token."""
    return next(token_id for token_id, entry in position.items() if entry.rank == 1)


def measure(variants: Mapping[str, Mapping[str, str]], max_windows: int | None = None) -> list[Score]:
    """Score every variant; the first one is what the others' choices are compared with."""
    tokenizer = Tokenizer.from_file(str(Path(default_model_path()) / "tokenizer.json"))
    prompts = list(windows(tokenizer))[:max_windows]
    scores: list[Score] = []
    reference: list[int] = []
    for name, options in variants.items():
        logprobs, choices = read(prompts, options)
        reference = reference or choices
        same = sum(ours == theirs for ours, theirs in zip(choices, reference, strict=True))
        scores.append(Score(name, -sum(logprobs) / len(logprobs), same / len(choices), len(choices)))
    return scores


def table(scores: list[Score]) -> str:
    """Return the scores in Markdown."""
    base = scores[0].nats_per_token
    lines = ["| weights, KV | nats per token | more than bf16 | same greedy choice |", "|---|---|---|---|"]
    lines += [
        f"| {score.name} | {score.nats_per_token:.4f} | {score.nats_per_token - base:+.4f} | {score.same_choice:.2%} |"
        for score in scores
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the scores here")
    arguments = parser.parse_args()
    scores = measure(VARIANTS)
    print(table(scores))
    print(f"\n{scores[0].num_tokens} tokens of held-out library files, in windows of {WINDOW}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n")


if __name__ == "__main__":
    main()
