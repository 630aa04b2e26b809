"""``quintet convert``: converts pickled weights or a GGUF file to safetensors."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal, get_args

from tqdm import tqdm

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.gguf.tokenizer import generation_of_gguf
from quintet.deploy.config.memory import format_size
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.tools.quantize.target import atomic_output, check_apart, check_space, check_target
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.wire.config import Dtype
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import GGUF, is_gguf

_DESCRIPTION = """\
MODEL with pytorch_model*.bin: write safetensors into the same folder. Quintet prefers them: their headers are validated, and
the weights are memory-mapped instead of unpickled. The pickled files are read with torch's weights-only reader and are kept.

MODEL.gguf OUT: write a folder with config.json, tokenizer, chat template and the weights as safetensors. Quantized weights are
dequantized to bf16, or to --dtype; other weights are unchanged. Quintet can serve the folder. Other programs can read it if they
use the same tensor names for the model family.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "convert",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="quintet convert MODEL | quintet convert MODEL.gguf OUT [--dtype DTYPE] [--overwrite]",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="local folder, GGUF file, or hub name")
    parser.add_argument(
        "out", metavar="OUT", type=Path, nargs="?", help="output folder, for a GGUF file only"
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="data type of dequantized weights of a GGUF file; float32 is exact (default: the served data type)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def run(arguments: argparse.Namespace) -> int:
    from quintet.executor.checkpoints.weights.convert import convert  # imports torch

    out: Path | None = arguments.out and arguments.out.expanduser()
    if out is not None and out.suffix == GGUF:
        raise ConfigError(
            f"OUT is {str(out)!r}; it must be a folder, not a {GGUF} file: use `quintet quantize` to write GGUF files"
        )
    if out is not None:
        check_target(out, arguments.overwrite)
    elif arguments.overwrite or arguments.dtype:
        flag = "--overwrite" if arguments.overwrite else "--dtype"
        raise ConfigError(
            f"{flag} requires OUT, the output folder for a GGUF file: give OUT, or drop the flag"
        )
    source = locate_model(arguments.model, with_weights=True)
    if out is None:
        convert(source, print)
    elif is_gguf(source):
        check_apart(out, source)
        convert_gguf(source, out, arguments.dtype or "auto")
    else:
        raise ConfigError(
            f"OUT {str(out)!r} is for GGUF files only; safetensors of {str(source)!r} are written into the same folder: drop OUT"
        )
    return 0


def convert_gguf(file: Path, out: Path, dtype: Dtype | Literal["auto"] = "auto") -> None:
    """Write a GGUF file's model as a folder; show a progress bar on a terminal."""
    from quintet.executor.checkpoints.gguf.convert import Folder  # imports torch
    from quintet.executor.checkpoints.quant.blocks import read_blocks

    # The mock executor has no weights, so that a file larger than the memory can be converted tensor by tensor.
    options = Options(model=str(file), dtype=dtype, device="cpu", executor="mock", max_num_seqs=1)
    model = resolve(options, Path(tempfile.gettempdir()) / "quintet-convert", http=False).config.model
    with tqdm(unit="weight", unit_scale=True, desc=out.name, file=sys.stderr, disable=None) as bar:
        folder = Folder(file, model, read_blocks, bar.update)
        bar.reset(folder.num_numbers)
        check_space(out, folder.num_bytes)
        with atomic_output(out) as made:
            shutil.copytree(model.tokenizer_path, made)
            generation = generation_of_gguf(read_parts(Path(model.path))) | {
                "eos_token_id": model.eos_token_ids
            }
            (made / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
            folder.write(made)
    print(f"{out}: {format_size(folder.num_bytes)} of {file.name}")
