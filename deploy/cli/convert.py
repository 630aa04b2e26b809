"""``quintet convert``: a model's pickled weights, or a GGUF file, as safetensors."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tqdm import tqdm

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.gguf.endings import generation_of_gguf
from quintet.deploy.config.memory import format_size
from quintet.deploy.config.source import locate_model
from quintet.deploy.tools.quantize.target import check_apart, check_space, check_target, in_place_of
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.wire.config import Dtype, ModelConfig
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import GGUF, is_gguf

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DESCRIPTION = """\
MODEL with pytorch_model*.bin: write safetensors beside them. These are checked before anything is read, mapped rather than
unpickled, and preferred from then on. The pickled files are read by torch's weights-only reader and stay as they are.

MODEL.gguf OUT: write a folder with config.json, tokenizer, chat template and the file's numbers as safetensors. What is quantized
becomes bf16, or the --dtype, rounded once; the rest stays as it is. Quintet serves the folder; other programs read it where the
family's tensors have the same names in their own checkpoints.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "convert",
        help="write a model's pytorch_model.bin, or a GGUF file, as safetensors",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="quintet convert MODEL | quintet convert MODEL.gguf OUT [--dtype DTYPE] [--overwrite]",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a local folder, a GGUF file, or a name on the hub")
    parser.add_argument(
        "out", metavar="OUT", type=Path, nargs="?", help="of a GGUF file: the folder to write"
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="of a GGUF file: number format of what is quantized; float32 rounds nothing (default: the one it is served in)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")


def run(arguments: argparse.Namespace) -> int:
    """Convert, a line for each file."""
    from quintet.executor.checkpoints.weights.convert import convert  # brings torch

    out: Path | None = arguments.out and arguments.out.expanduser()
    if out is not None and out.suffix == GGUF:
        raise ConfigError(
            f"OUT {str(out)!r} must be a folder, not end in {GGUF}: `quintet quantize` writes such files"
        )
    if out is not None:
        check_target(out, arguments.overwrite)
    elif arguments.overwrite or arguments.dtype:
        flag = "--overwrite" if arguments.overwrite else "--dtype"
        raise ConfigError(f"{flag} is for OUT, the folder made of a GGUF file: name one, or drop the flag")
    source = locate_model(arguments.model, with_weights=True)
    if out is None:
        convert(source, print)
    elif is_gguf(source):
        check_apart(out, source)
        convert_gguf(source, out, arguments.dtype or "auto")
    else:
        raise ConfigError(
            f"OUT {str(out)!r} is for GGUF files; safetensors of {str(source)!r} are written beside its weights"
        )
    return 0


def convert_gguf(file: Path, out: Path, dtype: Dtype | Literal["auto"] = "auto") -> None:
    """Write a file's model as a folder, with a bar on a terminal and a line at the end."""
    from quintet.executor.checkpoints.gguf.convert import Folder  # brings torch
    from quintet.executor.checkpoints.quant.blocks import read_blocks

    options = Options(
        model=str(file),
        dtype=dtype,
        device="cpu",
        load_format="dummy",
        max_num_seqs=1,
        kv_cache_memory="1TiB",
    )
    model = resolve(options, Path(tempfile.gettempdir()) / "quintet-convert", http=False).config.model
    with tqdm(unit="weight", unit_scale=True, desc=out.name, file=sys.stderr, disable=None) as bar:
        folder = Folder(file, model, read_blocks, bar.update)
        bar.reset(folder.num_numbers)
        check_space(out, folder.num_bytes)
        with in_place_of(out) as made:
            shutil.copytree(model.tokenizer_path, made)
            _write_generation_config(model, made)
            folder.write(made)
    print(f"{out}: {format_size(folder.num_bytes)} of {file.name}")


def _write_generation_config(model: ModelConfig, out: Path) -> None:
    said = generation_of_gguf(read_parts(Path(model.path))) | {"eos_token_id": model.eos_token_ids}
    (out / "generation_config.json").write_text(json.dumps(said, indent=2) + "\n")
