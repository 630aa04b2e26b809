"""Measure the CPU time of all processes of an idle server.

    python -m bench.idle [--seconds 60]

Starts `quintet serve` with the embedded model, waits until it is ready and idle, and prints JSON: percent of one core, by role.
"""

from __future__ import annotations

import json
import time

from bench.arguments import command_parser
from bench.overhead.server import serve
from quintet.deploy.embedded import default_model_path

SETTLE_S = 3.0


def main() -> None:
    """Measure and print."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the measurement (default: 60)"
    )
    duration_s = parser.parse_args().seconds
    with serve(default_model_path()) as server:
        time.sleep(SETTLE_S)
        begin_s, before = time.monotonic(), server.cpu_seconds()
        time.sleep(duration_s)
        seconds, after = time.monotonic() - begin_s, server.cpu_seconds()
    percent = {role: round(100 * (after[role] - before[role]) / seconds, 3) for role in before}
    print(json.dumps({"percent_of_a_core": percent, "total": round(sum(percent.values()), 3)}, indent=1))


if __name__ == "__main__":
    main()
