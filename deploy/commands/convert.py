"""``quintet convert``: a model's pickled weights as safetensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quintet.deploy.resolve.source import locate_model

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "convert",
        help="write a model's pytorch_model.bin as safetensors",
        description="Write safetensors beside a model's pytorch_model*.bin: they are checked before anything is read, mapped"
        " rather than unpickled, and preferred from then on. The pickled files are read by torch's weights-only reader and"
        " stay as they are.",
        usage="quintet convert MODEL",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a local folder, or a name on the hub")


def run(arguments: argparse.Namespace) -> int:
    """Convert, a line for each file."""
    from quintet.executor.weights.convert import convert  # brings torch

    convert(locate_model(arguments.model, with_weights=True), print)
    return 0
