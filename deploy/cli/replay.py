"""``quintet replay``: what `quintet serve --record` kept of one process, played to that process alone."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.deploy.tools.replay.roles import replay
from quintet.process.log import configure_logging
from quintet.process.record import RecordingError, open_recording

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "replay",
        help="play a recording to one process alone, and compare what it does",
        description="Give one process what it was sent while `quintet serve --record FOLDER` ran, in the same batches at "
        "the same times of its clock, and compare what it sends with what it sent then. Exit status: 0 when all is "
        "equal, 1 at a difference, 2 when there is nothing to play.",
    )
    parser.add_argument("folder", type=Path, help="as given to --record")
    parser.add_argument(
        "worker", metavar="WORKER", help="which process: its role, index and epoch, e.g. core-0.1"
    )


def run(arguments: argparse.Namespace) -> int:
    """Play, and print the account."""
    configure_logging("replay", "WARNING")
    began = time.monotonic()
    try:
        recording = open_recording(arguments.folder, arguments.worker)
        account = replay(recording)
    except RecordingError as error:
        print(f"quintet replay: {error}", file=sys.stderr)
        return 2
    print(
        f"{arguments.worker}: {account.num_turns} turns, {account.num_received} frames in, "
        f"{account.num_sent} frames out as they were, in {time.monotonic() - began:.1f} s"
    )
    if not recording.is_whole:
        print(
            f"  the first {recording.header.segment - 1} segments are gone; played from the first idle moment after"
        )
    if account.difference is None:
        print("  all equal")
        return 0
    print(f"  FIRST DIFFERENCE: {account.difference}")
    return 1
