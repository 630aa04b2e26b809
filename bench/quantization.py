"""What quantization costs the embedded model: held-out loss, and how often its greedy choice stays the same.

The text is the library files that were kept from the model when it was trained (``bench.embedded.corpus``), read in windows
through the Python API: the same kernels, processes and steps as any request. Losses of two rows may be compared with each
other, not with a larger model's: the smaller a model, the more a lost bit hurts it.

    python -m bench.quantization [--formats | --made] [--only NAME]... [--int8-activations] [--windows N] [--json FILE]

With ``--formats`` the rows are formats of quantized checkpoints instead, which are made of the embedded model by rounding each
number to the nearest: what their publishers do better is not in it. With ``--made`` they are what `quintet quantize` writes,
GPTQ and AWQ calibrated with library files that the model was trained on. With ``--int8-activations`` each row whose weights are
integers comes a second time, computed with ``--activation-dtype int8``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.embedded.corpus import Kind, build_corpus
from bench.quantized import (
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
from bench.quantized_tools import hqq, squeezellm, torchao
from quintet.deploy.cli import main as cli
from quintet.deploy.embedded import default_model_path
from quintet.deploy.tools.quantize.loss import measure, table
from quintet.deploy.tools.quantize.settings import WINDOW
from quintet.deploy.tools.quantize.windows import windows_of
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES
from quintet.executor.checkpoints.quantize_tool.targets import TARGETS

END_OF_TEXT = 0
"""Documents begin with it, as in training."""
SEED = 5
"""The seed of the training run; it only picks the wording of chats, which are not read here."""

VARIANTS: Mapping[str, Mapping[str, str]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "w8a8": {"quantization": "w8a8"},
    "int4": {"quantization": "int4"},
    "bf16, int8 KV": {"kv_cache_dtype": "int8"},
    "int4, int8 KV": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "bf16, fp8 KV": {"kv_cache_dtype": "fp8"},
    "bf16, int4 KV": {"kv_cache_dtype": "int4"},
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
"""Of these weights are multiplied as floating-point numbers, and so are inputs."""


def held_out(max_windows: int | None) -> list[list[int]]:
    """Return the held-out text in windows."""
    tokenizer = Tokenizer.from_file(str(Path(default_model_path()) / "tokenizer.json"))
    documents = build_corpus(SEED)
    texts = (each.text for each in documents if each.held_out and each.kind is Kind.LIBRARY)
    return list(islice(windows_of(tokenizer, texts, [END_OF_TEXT]), max_windows))


def write(written: Written, folder: Path) -> dict[str, str]:
    """Write the embedded model in a format into a folder; return the options that load it."""
    source = Path(default_model_path())
    shutil.copytree(source, folder)
    kept, _ = in_format(written, load_file(source / "model.safetensors"))
    save_file(kept, folder / "model.safetensors")
    card = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(card | {"quantization_config": written.section}))
    return {"model": str(folder)}


def with_int8_activations(variants: Mapping[str, Mapping[str, str]]) -> Mapping[str, Mapping[str, str]]:
    """Return the rows, and behind each whose weights are integers the same with inputs in 8 bits."""
    found = {}
    for name, options in variants.items():
        found[name] = options
        if name not in FLOATS and options.keys() & {"quantization", "model"}:
            found[f"{name}, int8 activations"] = {**options, "activation_dtype": "int8"}
    return found


def made(folder: Path, only: Collection[str]) -> Mapping[str, Mapping[str, str]]:
    """Have the embedded model written in every format that there is, or ``only`` these; return what loads each."""
    text = folder / "calibration.txt"
    documents = [each.text for each in build_corpus(SEED) if not each.held_out and each.kind is Kind.LIBRARY]
    text.write_text("\n".join(documents[:: len(documents) // 20]))
    found = {}
    for name in (*TARGETS, *MIXES):
        if only and name not in only:
            continue
        out = folder / (f"{name}.gguf" if name in MIXES else name)
        more = ["--calibration", str(text)] if name in TARGETS and TARGETS[name].is_calibrated else []
        assert cli.main(["quantize", str(default_model_path()), str(out), "--format", name, *more]) == 0
        found[name] = {"model": str(out), "tokenizer": str(default_model_path())}
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", action="store_true", help="formats of checkpoints instead")
    parser.add_argument("--made", action="store_true", help="what `quintet quantize` writes instead")
    parser.add_argument("--only", action="append", default=[], help="this row, besides bf16; may be repeated")
    parser.add_argument(
        "--int8-activations",
        action="store_true",
        help="each row of integers once more, with inputs in 8 bits",
    )
    parser.add_argument("--windows", type=int, help=f"read so many of {WINDOW} tokens alone")
    parser.add_argument("--json", type=Path, help="also write the scores here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        variants = VARIANTS
        if arguments.formats:
            folders = {
                name: write(each, Path(folder) / str(i))
                for i, (name, each) in enumerate(FORMATS.items())
                if name in arguments.only or not arguments.only
            }
            variants = {"bf16": {}, **folders}
        if arguments.made:
            variants = {
                "bf16": {},
                **{key: each for key, each in made(Path(folder), arguments.only).items() if key != "bf16"},
            }
        if arguments.only:
            variants = {name: each for name, each in variants.items() if name in ("bf16", *arguments.only)}
        if arguments.int8_activations:
            variants = with_int8_activations(variants)
        scores = list(measure(variants, held_out(arguments.windows)))
    print(table(scores))
    print(f"\n{scores[0].num_tokens} tokens of held-out library files, in windows of {WINDOW}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n")


if __name__ == "__main__":
    main()
