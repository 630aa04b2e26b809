"""``quintet trace``: merges and analyzes the traces of ``quintet serve --trace``."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from quintet.deploy.tools.step_account import account, bars_of, read_folder, steps_of
from quintet.process.trace import merge


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "trace",
        description="Merge the traces of `quintet serve --trace FOLDER` into one file for https://ui.perfetto.dev or "
        "chrome://tracing, and print the spans of the median step.",
    )
    parser.add_argument("folder", type=Path, help="folder given to --trace")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file of the merged trace (default: FOLDER/merged.json)"
    )
    parser.add_argument(
        "--first-step", type=int, default=0, metavar="N", help="ignore earlier steps (default: 0)"
    )
    parser.add_argument("--last-step", type=int, metavar="N", help="ignore later steps (default: none)")


def run(arguments: argparse.Namespace) -> int:
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
