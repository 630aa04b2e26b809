"""A driver's loop: print ``ready``, then read jobs as lines of JSON and print their results.

Libraries print to stdout, so results are written to a duplicate of its descriptor, and stdout is redirected to stderr.
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
    """Parse the command line, which is the same for all drivers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--quantization")
    return parser.parse_args()


def take_output_pipe() -> int:
    """Return a duplicate of stdout for the results, and redirect stdout to stderr. Call it before any output."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def serve_jobs(descriptor: int, run: Callable[[Job], JobResult]) -> None:
    """Print ``ready``, then run jobs until stdin ends."""
    with os.fdopen(descriptor, "w", buffering=1) as output:
        print(READY, file=output)
        for line in sys.stdin:
            print(encode_result(run(decode_job(line))), file=output)
