"""``quintet trace``: what the processes of a server that ran with ``--trace`` did when."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quintet.deploy.tools.step_account import account, bars_of, read_folder, steps_of
from quintet.process.trace import merge

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "trace",
        help="show where the time of a step went, in every process",
        description="Read what `quintet serve --trace FOLDER` left: merge it into one file that "
        "https://ui.perfetto.dev and chrome://tracing show, and print the median step, span by span.",
    )
    parser.add_argument("folder", type=Path, help="as given to --trace")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the merged trace (default: FOLDER/merged.json)"
    )
    parser.add_argument(
        "--first-step", type=int, default=0, metavar="N", help="leave out the steps before (default: 0)"
    )
    parser.add_argument(
        "--last-step", type=int, metavar="N", help="leave out the steps after (default: none)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Merge, and print the account."""
    folder: Path = arguments.folder
    merged = merge(read_folder(folder))
    out: Path = arguments.out or folder / "merged.json"
    out.write_bytes(msgspec.json.encode(merged))
    print(f"{out}: {len(merged.traceEvents)} events; open it in https://ui.perfetto.dev")
    bars = bars_of(merged)
    steps = [
        step
        for step in steps_of(bars)
        if step.number >= arguments.first_step
        and (arguments.last_step is None or step.number <= arguments.last_step)
    ]
    print(account(bars, steps).text())
    return 0
