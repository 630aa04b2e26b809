"""The drivers' side of the pipe: ``ready`` once, then one line of JSON per job, and one back.

Libraries print to stdout as they please, so the answers travel on a copy of it and stdout itself becomes stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bench.peers.jobs import Job, JobResult, decode_job, encode_result

READY = "ready"


def read_arguments(description: str | None) -> argparse.Namespace:
    """Return the command line that all drivers share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--quantization")
    return parser.parse_args()


def take_answers_pipe() -> int:
    """Return a descriptor for the answers and point stdout at stderr. Call it before anything prints."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def serve_jobs(descriptor: int, run: Callable[[Job], JobResult]) -> None:
    """Say ``ready``, then answer jobs until stdin ends."""
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        print(READY, file=answers)
        for line in sys.stdin:
            print(encode_result(run(decode_job(line))), file=answers)
