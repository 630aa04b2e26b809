"""The process of a rank that is not the first: ``python -m quintet.executor.parallel.follower``, started by rank 0.

Has no seat, no sockets, and nothing to lose: between two orders it keeps weights and KV memory, and nobody's requests. Ends with
rank 0 from its first line on, while torch is being imported too.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import signal
import sys

import msgspec
import setproctitle

from quintet.executor.platforms.shares import take_share
from quintet.process.log import configure_logging
from quintet.process.runtime import die_with_parent, error_file
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError
from quintet.wire.ids import Role, WorkerId

FOLLOWING = {"cpu": "quintet.executor.parallel.following", "cuda": "quintet.executor.cuda.following"}
"""Where the work is, by ``ExecutorConfig.device``: imported once this process has a name and a parent, since torch comes
with it."""


def main() -> None:
    """Be a rank until rank 0 ends, or this fails. The configuration comes by standard input."""
    parser = argparse.ArgumentParser(description="A rank of an executor; started by its first one.")
    parser.add_argument("--index", type=int, required=True, help="seat of the executor")
    parser.add_argument("--epoch", type=int, required=True, help="how often that seat has been filled")
    parser.add_argument("--rank", type=int, required=True, help="which rank, from 1")
    parser.add_argument("--groups", default="", help="descriptors of the memory of each stage's ranks")
    parser.add_argument(
        "--links", default="", help="descriptors of the memory between each stage and the next"
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    arguments = parser.parse_args()
    die_with_parent()
    if os.getppid() != arguments.parent:
        raise SystemExit("rank 0 is gone")
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the supervisor decides
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    me = WorkerId(Role.EXECUTOR, arguments.index, arguments.epoch)
    setproctitle.setproctitle(f"quintet-{me.role}-{me.index}-rank-{arguments.rank}")
    log = configure_logging(f"{me}.rank{arguments.rank}", config.log_level)
    try:
        config = take_share(me.index, config, arguments.rank)
        descriptors = (_numbers(arguments.groups), _numbers(arguments.links))
        following = importlib.import_module(FOLLOWING[config.executor.device])
        following.follow_for_ever(config, *descriptors, arguments.rank)
    except Exception as error:
        is_config = isinstance(error, ConfigError)
        words = str(error) if is_config else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            error_file(config.run_dir, me).write_text(f"rank {arguments.rank}: {words}")
        if not is_config:
            log.critical("died of %s", type(error).__name__, exc_info=True)
        sys.exit(EXIT_CONFIG if is_config else 1)


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(",") if word)


if __name__ == "__main__":
    main()
