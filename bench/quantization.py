"""What quantization costs the embedded model: held-out loss, and how often its greedy choice stays the same.

The text is the library files that were kept from the model when it was trained (``bench.embedded.corpus``), read in windows
through the Python API: the same kernels, processes and steps as any request. Losses of two rows may be compared with each
other, not with a larger model's: the smaller a model, the more a lost bit hurts it.

    python -m bench.quantization [--formats] [--windows N] [--json FILE]

With ``--formats`` the rows are formats of quantized checkpoints instead, which are made of the embedded model by rounding each
number to the nearest: what their publishers do better is not in it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.embedded.corpus import Kind, build_corpus
from bench.quantized import (
    Written,
    awq,
    bitsandbytes,
    compressed,
    four_bit_floats,
    fp8,
    gptq,
    in_format,
)
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


GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
BY_ROW = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
FORMATS: Mapping[str, Written] = {
    "GPTQ, 8 bits, groups of 128": gptq(8, 128, symmetric=True),
    "GPTQ, 4 bits, groups of 128": gptq(4, 128, symmetric=True),
    "GPTQ, 4 bits, groups of 32, zero points": gptq(4, 32, symmetric=False),
    "GPTQ, 3 bits, groups of 128, zero points": gptq(3, 128, symmetric=False),
    "AWQ, groups of 128": awq(128),
    "compressed-tensors W4A16": compressed(GROUPS, "pack-quantized"),
    "compressed-tensors W8A8": compressed(BY_ROW, "int-quantized", BY_TOKEN),
    "FP8, blocks of 128 by 128": fp8(block=True),
    "NVFP4": compressed(
        FP4 | {"strategy": "tensor_group", "group_size": 16},
        "nvfp4-pack-quantized",
        tensors=four_bit_floats(16, global_scale="weight_global_scale"),
    ),
    "MXFP4": compressed(
        FP4 | {"strategy": "group", "group_size": 32}, "mxfp4-pack-quantized", tensors=four_bit_floats(32)
    ),
    "bitsandbytes nf4": bitsandbytes("nf4", nested=True),
    "bitsandbytes int8": bitsandbytes("int8"),
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


def read(prompts: list[list[int]], options: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """Return the log-probability of every token of the prompts and the most likely token at its place."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    logprobs, choices = [], []
    with LLM(**options) as llm:
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


def write(written: Written, folder: Path) -> dict[str, str]:
    """Write the embedded model in a format into a folder; return the options that load it."""
    source = Path(default_model_path())
    shutil.copytree(source, folder)
    kept, _ = in_format(written, load_file(source / "model.safetensors"))
    save_file(kept, folder / "model.safetensors")
    card = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(card | {"quantization_config": written.section}))
    return {"model": str(folder)}


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
    parser.add_argument("--formats", action="store_true", help="formats of checkpoints instead")
    parser.add_argument("--windows", type=int, help=f"read so many of {WINDOW} tokens alone")
    parser.add_argument("--json", type=Path, help="also write the scores here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        variants = VARIANTS
        if arguments.formats:
            folders = {
                name: write(each, Path(folder) / str(i)) for i, (name, each) in enumerate(FORMATS.items())
            }
            variants = {"bf16": {}, **folders}
        scores = measure(variants, arguments.windows)
    print(table(scores))
    print(f"\n{scores[0].num_tokens} tokens of held-out library files, in windows of {WINDOW}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n")


if __name__ == "__main__":
    main()
