"""``python -m quintet.deploy.ray.child``: `quintet serve` for an actor, which ends when the actor does, however it does.

The actor holds the write end of the pipe behind ``--parent-fd``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quintet.deploy.commands.serve import serve
from quintet.deploy.resolve.config_file import merged_options
from quintet.wire.errors import EXIT_CONFIG, ConfigError


def main() -> int:
    """Serve on a Unix socket."""
    parser = argparse.ArgumentParser(prog="python -m quintet.deploy.ray.child", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of flags")
    parser.add_argument("--uds", required=True, help="socket to listen on")
    parser.add_argument("--parent-fd", type=int, required=True, help="read end; its end of file means: stop")
    arguments = parser.parse_args()
    try:
        options, notes = merged_options(arguments.config, {"uds": arguments.uds})
        return serve(options, notes, arguments.parent_fd)
    except ConfigError as error:
        print(f"quintet: {error}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
