"""Random and mutated bytes for every inbox and every route of a running server.

    python -m tests.chaos.fuzz --seconds 600 --seed 7      a longer run than the test's, of a server of its own

Frames come from one who has not the server's key, and from one who has it and sends nonsense. What is *not* sent: orders
that would be obeyed (`Stop`, `Drain`, a believable `Topology` or `Capacity`), and claims to know a later process or topology,
for who has the key may give and make them.
"""

from __future__ import annotations

import argparse
import os
import random
import time

from ..processes.server import Server, serve
from .fuzz_frames import BusFuzz
from .fuzz_requests import HttpFuzz


def storm(server: Server, seconds: float, seed: int, *, frames_at_once: int = 20) -> HttpFuzz:
    """Send to everything for a while; return what HTTP answered."""
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
    """Storm a server of one's own and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--executor", choices=("mock", "torch"), default="mock")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with serve("--executor", arguments.executor, "--drain-timeout", "3") as server:
        before = {name: child.pid for name, child in server.children().items()}
        web = storm(server, arguments.seconds, arguments.seed)
        after = {name: child.pid for name, child in server.children().items()}
        print("statuses", dict(sorted(web.statuses.items())))
        for status, request in web.wrong[:20]:
            print(status, request[:2000])
        print("no process died" if before == after else f"died: {before} {after}")
        print("\n".join(server.lines[-40:]), flush=True)


if __name__ == "__main__":
    main()
