"""Measure the loss of number formats relative to float32: perplexity, KL divergence, top token.

    python -m bench.quantization.loss [--made | --formats] [--model MODEL] [--only NAME]... [--int8-activations]
        [--windows N] [--json FILE]

The rows are formats that a server converts to at load time (``--quantization``, ``--kv-cache-dtype``). With
``--made`` they are formats that `quintet quantize` writes. With ``--formats`` they are formats of quantized
checkpoints, written by round-to-nearest without the calibration that publishers use. With ``--int8-activations``, each row with
integer weights is measured again with ``--activation-dtype int8``.

MODEL is a packaged model (default: ``smollm2``), a GGUF file or a folder; a file is first dequantized to float32. The
text is the standard library's documentation (`bench.quantization.texts`). ``--model embedded`` is the embedded model, measured on
library files outside its training data (`bench.embedded.corpus`). Compare only rows with the same model and text.

Rows with results in FILE are not measured again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.arguments import command_parser
from bench.embedded.corpus import Kind, build_corpus
from bench.peers.records import this_commit, this_machine
from bench.quantization import texts
from bench.quantization.distributions import Reference, Score, score, table
from bench.quantization.layers import (
    Written,
    awq,
    bitsandbytes,
    compressed,
    eight_bit_floats_of_powers,
    four_bit_floats,
    fp8,
    gptq,
    in_format,
)
from bench.quantization.more_layers import hqq, squeezellm, torchao
from quintet.deploy.cli.convert import convert_gguf
from quintet.deploy.cli.main import main as cli
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.embedded import default_model_path
from quintet.deploy.tools.quantize.windows import WINDOW, first_tokens, windows_of
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES
from quintet.executor.checkpoints.quantize_tool.targets import TARGETS
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import is_gguf

END_OF_TEXT = 0
"""First token of the embedded model's documents, as in training."""
SEED = 5
"""Seed of the embedded model's training run; it affects only chats, which are not used here."""
NUM_WINDOWS = 12
EMBEDDED = "embedded"
REFERENCE = "float32"

LOADED: Mapping[str, Mapping[str, str]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "w8a8": {"quantization": "w8a8"},
    "int4": {"quantization": "int4"},
    "bf16, int8 KV": {"kv_cache_dtype": "int8"},
    "bf16, fp8 KV": {"kv_cache_dtype": "fp8"},
    "bf16, int4 KV": {"kv_cache_dtype": "int4"},
    "int4, int8 KV": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "int4, int4 KV": {"quantization": "int4", "kv_cache_dtype": "int4"},
}

GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
BY_ROW = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
FP8 = FP4 | {"num_bits": 8}
FORMATS: Mapping[str, Written] = {
    "GPTQ, 8 bits, groups of 128": gptq(8, 128, symmetric=True),
    "GPTQ, 4 bits, groups of 128": gptq(4, 128, symmetric=True),
    "GPTQ, 4 bits, groups of 32, zero points": gptq(4, 32, symmetric=False),
    "GPTQ, 3 bits, groups of 128, zero points": gptq(3, 128, symmetric=False),
    "AWQ, groups of 128": awq(128),
    "GPTQ, 2 bits, groups of 32, zero points": gptq(2, 32, symmetric=False),
    "HQQ, 8 bits, groups of 64": hqq(8, 64),
    "HQQ, 4 bits, groups of 64": hqq(4, 64),
    "HQQ, 3 bits, groups of 64": hqq(3, 64),
    "HQQ, 2 bits, groups of 16": hqq(2, 16),
    "torchao, 8 bits": torchao("Int8WeightOnlyConfig"),
    "torchao, 4 bits, groups of 128": torchao("Int4WeightOnlyConfig", 128, symmetric=False),
    "torchao, 4 bits, groups of 32": torchao("Int4WeightOnlyConfig", 32, symmetric=False),
    "SqueezeLLM, 4 bits": squeezellm(4, outliers=False, rounds=20),
    "SqueezeLLM, 3 bits": squeezellm(3, outliers=False, rounds=20),
    "compressed-tensors W4A16": compressed(GROUPS, "pack-quantized"),
    "compressed-tensors W8A16": compressed(BY_ROW, "pack-quantized"),
    "compressed-tensors W8A8": compressed(BY_ROW, "int-quantized", BY_TOKEN),
    "FP8, blocks of 128 by 128": fp8(block=True),
    "FP8, a scale for each row": fp8(block=False, method="fbgemm_fp8"),
    "FP8, a scale for each tensor": fp8(block=False),
    "MXFP8": compressed(
        FP8 | {"strategy": "group", "group_size": 32}, "mxfp8-quantized", tensors=eight_bit_floats_of_powers
    ),
    "NVFP4": compressed(
        FP4 | {"strategy": "tensor_group", "group_size": 16},
        "nvfp4-pack-quantized",
        tensors=four_bit_floats(16, global_scale="weight_global_scale"),
    ),
    "MXFP4": compressed(
        FP4 | {"strategy": "group", "group_size": 32}, "mxfp4-pack-quantized", tensors=four_bit_floats(32)
    ),
    "bitsandbytes nf4": bitsandbytes("nf4", nested=True),
    "bitsandbytes fp4": bitsandbytes("fp4", nested=True),
    "bitsandbytes int8": bitsandbytes("int8"),
}
FLOATS = {
    name
    for name in FORMATS
    if name.startswith(("FP8", "MXFP8", "SqueezeLLM", "bitsandbytes nf4", "bitsandbytes fp4"))
}
"""Formats with floating-point multiplications of weights and activations."""


@dataclass(frozen=True, slots=True)
class Source:
    """An unquantized model and the text windows."""

    folder: Path
    windows: Sequence[list[int]]
    calibration: str


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: one load of the model."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Source, Path], Path] | None = None
    """Function that writes the loaded checkpoint and returns its path. None: the source is loaded."""
    is_integer: bool = True
    """True if weights are multiplied as integers."""


def open_source(model: str, max_windows: int, scratch: Path) -> Source:
    """Return a model as a folder; a GGUF file is dequantized to float32 in ``scratch``."""
    if model == EMBEDDED:
        return _embedded(max_windows)
    located = locate_model(model, with_weights=True)
    folder = scratch / "float32"
    if is_gguf(located):
        convert_gguf(located, folder, "float32")
    else:
        folder = located
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    windows = windows_of(tokenizer, [texts.held_text()], first_tokens(tokenizer))
    return Source(folder, list(islice(windows, max_windows)), texts.calibration_text())


def _embedded(max_windows: int) -> Source:
    folder = Path(default_model_path())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library = [each for each in build_corpus(SEED) if each.kind is Kind.LIBRARY]
    held_out = (each.text for each in library if each.held_out)
    known = [each.text for each in library if not each.held_out]
    windows = windows_of(tokenizer, held_out, [END_OF_TEXT])
    return Source(folder, list(islice(windows, max_windows)), "\n".join(known[:: len(known) // 20]))


def _in_format(written: Written, source: Source, scratch: Path) -> Path:
    """Write the model in a format of quantized checkpoints; return its folder."""
    out = scratch / "rounded"
    shutil.copytree(source.folder, out)
    kept, _ = in_format(written, load_file(source.folder / "model.safetensors"))
    save_file(kept, out / "model.safetensors")
    hf_config = json.loads((source.folder / "config.json").read_bytes())
    (out / "config.json").write_text(json.dumps(hf_config | {"quantization_config": written.section}))
    return out


def _quantized(name: str, source: Source, scratch: Path) -> Path:
    """Run `quintet quantize`; return the file. Raises `ConfigError` if it fails; the command prints the cause."""
    out = scratch / (f"{name}.gguf" if name in MIXES else name)
    flags = ["--format", name]
    if name in TARGETS and TARGETS[name].is_calibrated:
        text = scratch / "calibration.txt"
        text.write_text(source.calibration)
        flags += ["--calibration", str(text)]
    if cli(["quantize", str(source.folder), str(out), *flags]):
        raise ConfigError(f"`quintet quantize` cannot write the model as {name}")
    return out


def rows_of(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the reference, then the rows of the command line."""
    if arguments.formats:
        for name, written in FORMATS.items():
            yield Row(name, {}, lambda *to, written=written: _in_format(written, *to), name not in FLOATS)
    elif arguments.made:
        for name in (*MIXES, *TARGETS):
            # An unquantized file keeps its dtype; computed in bf16, it would equal the row of bf16.
            own = {"dtype": "auto"} if name in ("f32", "f16") else {}
            is_integer = name not in ("f32", "f16", "bf16")
            yield Row(name, own, lambda *to, name=name: _quantized(name, *to), is_integer)
    else:
        for name, options in LOADED.items():
            yield Row(name, options, is_integer="quantization" in options)


def with_int8_activations(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows, and each row with integer weights again with 8-bit activations."""
    for row in rows:
        yield row
        if row.is_integer:
            name, more = f"{row.name}, int8 activations", {"activation_dtype": "int8"}
            yield replace(row, name=name, options={**row.options, **more})


def measured(row: Row, source: Source, reference: Reference) -> Score:
    """Write the checkpoint of a row, load it, and score it. Raises `ConfigError`."""
    base = {"model": str(source.folder), "tokenizer": str(source.folder), "dtype": "bfloat16"}
    if row.write is None:
        return score(row.name, {**base, **row.options}, source.windows, reference)
    with tempfile.TemporaryDirectory() as scratch:
        out = row.write(source, Path(scratch))
        files = [out] if out.is_file() else [*out.glob("*.safetensors")]
        found = score(row.name, {**base, **row.options, "model": str(out)}, source.windows, reference)
        return replace(found, file_mb=sum(file.stat().st_size for file in files) / 1e6)


def read_scores(path: Path | None) -> dict[str, Score]:
    """Return the scores of an earlier run, by row."""
    if path is None or not path.exists():
        return {}
    return {each["name"]: Score(**each) for each in json.loads(path.read_bytes())["scores"]}


def write_scores(path: Path, arguments: argparse.Namespace, scores: Sequence[Score]) -> None:
    """Write the scores with the settings of the measurement."""
    machine = this_machine()
    head = {
        "command": " ".join(["python -m bench.quantization.loss", *sys.argv[1:]]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{machine.cpu}, {machine.cores} cores",
        "python": machine.python,
        "commit": this_commit(),
        "model": arguments.model,
    }
    report = head | {"scores": [asdict(each) for each in scores]}
    path.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("--formats", action="store_true", help="measure formats of quantized checkpoints")
    parser.add_argument("--made", action="store_true", help="measure formats that `quintet quantize` writes")
    parser.add_argument("--model", default="smollm2", help="packaged model, GGUF file, folder, or embedded")
    parser.add_argument("--only", action="append", default=[], help="measure only this row; may be repeated")
    parser.add_argument(
        "--int8-activations",
        action="store_true",
        help="measure rows with integer weights again with 8-bit activations",
    )
    parser.add_argument(
        "--windows",
        type=int,
        default=NUM_WINDOWS,
        help=f"number of windows of {WINDOW} tokens (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="file of the scores, written after each row")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse()
    rows = rows_of(arguments)
    if arguments.int8_activations:
        rows = with_int8_activations(rows)
    scores = read_scores(arguments.json)
    wanted = [row for row in rows if not arguments.only or row.name.split(", int8 act")[0] in arguments.only]
    with tempfile.TemporaryDirectory() as scratch:
        source, reference = open_source(arguments.model, arguments.windows, Path(scratch)), Reference()
        for row in (Row(REFERENCE, {"dtype": "float32"}), *wanted):
            if row.name in scores and row.name != REFERENCE:
                continue
            try:
                scores[row.name] = measured(row, source, reference)
            except ConfigError as error:
                print(f"{row.name}: {error}", file=sys.stderr, flush=True)
                continue
            print(table([scores[row.name]]).splitlines()[-1], file=sys.stderr, flush=True)
            if arguments.json:
                write_scores(arguments.json, arguments, list(scores.values()))
    print(table(list(scores.values())))
    print(f"\n{scores[REFERENCE].num_tokens} tokens, in windows of {WINDOW} at most")


if __name__ == "__main__":
    main()
