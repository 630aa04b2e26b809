"""``quintet quantize``: quantizes a model to a GGUF file or a folder of safetensors."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from quintet.deploy.config.memory import format_size
from quintet.deploy.config.model.hf_config import ModelFacts, read_facts
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.tools.quantize.target import atomic_output, check_apart, check_space, check_target
from quintet.deploy.tools.quantize.windows import MAX_CALIBRATION_TOKENS, tokenizer_of, windows_of_text
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES
from quintet.executor.checkpoints.quantize_tool.targets import TARGETS
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import GGUF, hf_config_path, is_gguf

_SPARE_BYTES = 64 << 20
"""Allowance for metadata, mostly the vocabulary."""


def _help() -> str:
    gguf = "\n".join(f"  {name:9} {mix.words}" for name, mix in MIXES.items())
    folders = "\n".join(f"  {name:9} {each.words}" for name, each in TARGETS.items())
    return f"""\
Quantize a model. MODEL is a folder or a hub name with bf16, fp16 or fp32 weights.

GGUF formats, one file with tokenizer and chat template (OUT ends in .gguf), largest first:
{gguf}

folder formats, also read by vLLM, SGLang and transformers, for Quintet's model families with matrices [outputs, inputs]
(not GPT-2); gptq and awq do not support experts and recurrent states:
{folders}

examples:
  quintet quantize Qwen/Qwen3-0.6B qwen3.gguf --format q4_k_m
  quintet quantize ./my-model my-model.gguf --format q8_0 --text held-out.txt
      also measure the loss: nats per token of that text before and after, and the share of equal greedy tokens
  quintet quantize ./my-model ./my-model-int4 --format gptq --calibration representative-texts.txt
  quintet serve qwen3.gguf

Single-stream decode is bound by reading weights: a quarter of the bytes gives up to four times the tokens per second.
docs/quantization.md lists the loss of each format. OUT is created only when it is complete.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "quantize",
        description=_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="quintet quantize MODEL OUT --format FORMAT [--calibration FILE] [--text FILE] [--overwrite]",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="local folder, or hub name")
    parser.add_argument("out", metavar="OUT", type=Path, help="output file or folder")
    parser.add_argument(
        "--format",
        required=True,
        choices=(*MIXES, *TARGETS),
        metavar="FORMAT",
        help="one of the formats above",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help=f"calibration text for gptq and awq; the first {MAX_CALIBRATION_TOKENS} tokens are used",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="held-out text to measure the loss on",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def run(arguments: argparse.Namespace) -> int:
    """Quantize, and measure the loss if a text is given."""
    out: Path = arguments.out.expanduser()
    _check_flags(out, arguments)
    text = _read_text(arguments.text, "--text")
    calibration = _read_text(arguments.calibration, "--calibration")
    source = locate_model(arguments.model, with_weights=True)
    facts = _check_model(source, out)
    prompts = None if text is None else windows_of_text(facts, text)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes partial output
    started_s = time.monotonic()
    if arguments.format in MIXES:
        _write_gguf(facts, out, arguments.format)
    else:
        _write_folder(facts, out, arguments.format, calibration)
    size, original_size = _size(out), _size(source)
    print(
        f"{out}: {format_size(size)}, was {format_size(original_size)}, in {time.monotonic() - started_s:.0f} s",
        flush=True,
    )
    if prompts is not None:
        _measure({"before": source, arguments.format: out}, facts, prompts)
    return 0


def _check_flags(out: Path, arguments: argparse.Namespace) -> None:
    """Validate the flags, before the model is downloaded. Raises `ConfigError`."""
    is_file = arguments.format in MIXES
    if (out.suffix == GGUF) != is_file:
        allowed = f"end in {GGUF}" if is_file else f"be a folder, not end in {GGUF}"
        raise ConfigError(f"OUT is {str(out)!r}; with --format {arguments.format} it must {allowed}")
    is_calibrated = arguments.format in TARGETS and TARGETS[arguments.format].is_calibrated
    if (arguments.calibration is not None) != is_calibrated:
        raise ConfigError(
            f"--format {arguments.format} requires --calibration FILE, a text representative of prompts and outputs"
            if arguments.calibration is None
            else f"--calibration is for gptq and awq, but --format is {arguments.format}: drop it, or change the format"
        )
    check_target(out, arguments.overwrite)


def _check_model(source: Path, out: Path) -> ModelFacts:
    """Return the model facts. Raises `ConfigError` for a model that cannot be quantized."""
    if is_gguf(source):
        raise ConfigError(f"MODEL {str(source)!r} is a GGUF file: give the folder of the original checkpoint")
    check_apart(out, source)
    facts = read_facts(source, with_weights=True)
    if facts.stored is not None:
        raise ConfigError(
            f"MODEL {str(source)!r} is already quantized ({facts.stored.words}): give the original checkpoint"
        )
    if facts.implementation != "quintet":
        raise ConfigError(
            f"MODEL {str(source)!r}: Quintet does not implement {facts.architecture}, so its linear layers are unknown"
        )
    return facts


def _read_text(path: Path | None, flag: str) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {str(path)!r} cannot be read as UTF-8 text: {error}") from None
    if not text.strip():
        raise ConfigError(f"{flag} {str(path)!r} is empty")
    return text


def _write_gguf(facts: ModelFacts, out: Path, mix: str) -> None:
    from quintet.deploy.config.gguf.vocabulary import vocabulary_of
    from quintet.executor.checkpoints.gguf.writing.model import plan_of, write_gguf  # imports torch

    source = facts.path
    plan = plan_of(source, MIXES[mix], json.loads(facts.hf_config))
    vocabulary = vocabulary_of(source, tokenizer_of(source), facts.spec.vocab_size)
    check_space(out, plan.num_bytes + _SPARE_BYTES)
    with (
        atomic_output(out) as made,
        _bar(plan.num_numbers, mix) as bar,
    ):
        write_gguf(plan, made, vocabulary, bar.update)


def _write_folder(facts: ModelFacts, out: Path, name: str, calibration: str | None) -> None:
    from quintet.executor.checkpoints.quantize_tool.compressed import (  # imports torch
        plan_of,
        write_compressed,
    )

    source = facts.path
    hf_config = HfConfig(json.loads(facts.hf_config), str(hf_config_path(source)))
    plan = plan_of(source, facts.architecture, hf_config, TARGETS[name])
    check_space(out, plan.num_bytes + _SPARE_BYTES)
    if calibration is not None:
        from quintet.deploy.tools.quantize.calibration import calibrate

    with atomic_output(out) as made, _bar(plan.num_numbers, name) as bar:
        if calibration is not None:
            plan = calibrate(facts, plan, calibration, bar.update)
        write_compressed(plan, made, bar.update)


def _bar(total: int, label: str) -> tqdm[NoReturn]:
    return tqdm(total=total, unit="weight", unit_scale=True, desc=label, file=sys.stderr, disable=None)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of a folder's weights."""
    if path.is_file():
        return path.stat().st_size
    kinds = ("*.safetensors", "pytorch_model*.bin")
    return sum(file.stat().st_size for kind in kinds for file in path.glob(kind))


def _measure(variants: dict[str, Path], facts: ModelFacts, prompts: list[list[int]]) -> None:
    from quintet.deploy.tools.quantize.loss import Score, measure, table

    longest, tokenizer = max(map(len, prompts)), str(tokenizer_of(facts.path))
    options = {
        name: {"model": str(path), "max_model_len": longest + 1, "tokenizer": tokenizer}
        for name, path in variants.items()
    }
    scores: Sequence[Score] = list(measure(options, prompts, progress=sys.stderr.isatty()))
    print(f"\n{table(scores, 'weights')}\n\n{scores[0].num_tokens} tokens, in windows of at most {longest}")
