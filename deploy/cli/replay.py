"""``quintet replay``: replays a recording of `quintet serve --record` on one process."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from quintet.deploy.tools.replay.roles import replay
from quintet.process.log import configure_logging
from quintet.process.record import RecordingError, open_recording


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replay",
        description="Replay a recording of `quintet serve --record FOLDER` on one process. Batches and clock values are "
        "those of the recording, and output is compared with it. Exit status: 0 if all output is equal, 1 at a "
        "difference, 2 if there is no recording.",
    )
    parser.add_argument("folder", type=Path, help="folder given to --record")
    parser.add_argument("worker", metavar="WORKER", help="process: role, index and epoch, e.g. core-0.1")


def run(arguments: argparse.Namespace) -> int:
    configure_logging("replay", "WARNING")
    started_s = time.monotonic()
    try:
        recording = open_recording(arguments.folder, arguments.worker)
        account = replay(recording)
    except RecordingError as error:
        print(f"quintet replay: {error}", file=sys.stderr)
        return 2
    print(
        f"{arguments.worker}: {account.num_turns} turns, {account.num_received} frames in, "
        f"{account.num_sent} frames out, equal to the recording, in {time.monotonic() - started_s:.1f} s"
    )
    if not recording.is_whole:
        print(
            f"  the first {recording.header.segment - 1} segments were overwritten; started at the first idle moment after"
        )
    if account.difference is None:
        print("  all equal")
        return 0
    print(f"  FIRST DIFFERENCE: {account.difference}")
    return 1
