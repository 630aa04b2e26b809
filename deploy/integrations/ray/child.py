"""``python -m quintet.deploy.integrations.ray.child``: `quintet serve` as a child of a Ray actor.

The actor holds the write end of the ``--parent-fd`` pipe, so the server also stops if the actor crashes. The process owns the
folder of ``--config`` and removes it at exit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from quintet.deploy.cli.serve import serve
from quintet.deploy.config.flag_table import merged_options
from quintet.deploy.supervisor import run_dirs
from quintet.wire.errors import EXIT_CONFIG, ConfigError


def main() -> int:
    """Serve on a Unix socket, or as a headless host without HTTP."""
    parser = argparse.ArgumentParser(
        prog="python -m quintet.deploy.integrations.ray.child", description=__doc__
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file of flags; its folder is removed at exit"
    )
    parser.add_argument("--uds", help="Unix socket to listen on")
    parser.add_argument(
        "--parent-fd", type=int, required=True, help="read end of a pipe; end of file stops the server"
    )
    parser.add_argument("--message-fd", type=int, help="pipe for the message of a configuration error")
    arguments = parser.parse_args()
    claim = run_dirs.claim(arguments.config.parent)  # so that it is removed later if this process is killed
    try:
        options, notes = merged_options(arguments.config, {"uds": arguments.uds} if arguments.uds else {})
        return serve(options, notes, arguments.parent_fd)
    except ConfigError as error:
        print(f"quintet: {error}", file=sys.stderr)
        if arguments.message_fd is not None:
            os.write(arguments.message_fd, str(error).encode())
        return EXIT_CONFIG
    finally:
        shutil.rmtree(arguments.config.parent, ignore_errors=True)
        os.close(claim)


if __name__ == "__main__":
    sys.exit(main())
