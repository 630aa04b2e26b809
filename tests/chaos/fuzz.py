"""Random and mutated bytes for every inbox and every route of a running server.

    python -m tests.chaos.fuzz --seconds 600 --seed 7      starts a server; a longer run than the test's

Frames are signed with a random key, or contain invalid data under the server's key. Not sent, because holders of the key may
send them: valid orders (`Stop`, `Drain`, `Topology`, `Capacity`), and messages of later processes or topologies.
"""

from __future__ import annotations

import argparse
import os
import random
import time

from ..processes.server import Server, serve
from .fuzz_frames import BusFuzz
from .fuzz_requests import HttpFuzz


def fuzz(server: Server, seconds: float, seed: int, *, frames_at_once: int = 20) -> HttpFuzz:
    """Send to all inboxes and routes for `seconds`; return the HTTP client with its statuses."""
    draw = random.Random(seed)
    bus, web = BusFuzz(server, draw), HttpFuzz(server, draw)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            for _ in range(frames_at_once):
                bus.send()
            try:
                web.send()
            except ConnectionRefusedError:
                raise AssertionError(
                    "the server has closed its port:\n" + "\n".join(server.lines[-60:])
                ) from None
    finally:
        bus.close()
    return web


def main() -> None:
    """Start a server, fuzz it, and print the statuses and dead processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--executor", choices=("mock", "torch"), default="mock")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with serve("--executor", arguments.executor, "--drain-timeout", "3") as server:
        before = {name: child.pid for name, child in server.children().items()}
        web = fuzz(server, arguments.seconds, arguments.seed)
        after = {name: child.pid for name, child in server.children().items()}
        print("statuses", dict(sorted(web.statuses.items())))
        for status, request in web.wrong[:20]:
            print(status, request[:2000])
        print("no process died" if before == after else f"died: {before} {after}")
        print("\n".join(server.lines[-40:]), flush=True)


if __name__ == "__main__":
    main()
