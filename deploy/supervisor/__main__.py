"""``python -m quintet.deploy.supervisor --run-dir DIR``: a supervisor for a configuration that is already written.

The Python API starts one of these and holds the write end of the pipe behind ``--parent-fd``: when the API's process
ends, however it ends, the pipe closes and everything here stops.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import setproctitle

from quintet.deploy.supervisor.prefork import Prefork, roles_to_fork
from quintet.deploy.supervisor.startup_log import Failure, ReportedStartupLog
from quintet.deploy.supervisor.store_lock import alone
from quintet.deploy.supervisor.supervisor import Supervisor, SupervisorContext
from quintet.process.log import configure_logging
from quintet.process.runtime import CONFIG_FILE
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError


def main() -> int:
    """Supervise until told to stop, or until the parent is gone."""
    parser = argparse.ArgumentParser(prog="python -m quintet.deploy.supervisor", description=__doc__)
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="folder with config.json; removed at the end"
    )
    parser.add_argument("--parent-fd", type=int, help="read end of a pipe; its end of file means: stop")
    parser.add_argument("--report-fd", type=int, help="where the one line about the boot is written")
    arguments = parser.parse_args()
    setproctitle.setproctitle("quintet-supervisor")
    config = EngineConfig.read(arguments.run_dir / CONFIG_FILE)
    configure_logging("supervisor", config.log_level)
    nursery = Prefork(arguments.run_dir, None)
    nursery.fork(roles_to_fork(config.executor.kind != "mock", has_frontends=False))
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if arguments.parent_fd is not None:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # a terminal's Ctrl-C reaches the parent too, which decides
        signals.remove(signal.SIGINT)
    surroundings = SupervisorContext(parent_fd=arguments.parent_fd, signals=signals, nursery=nursery)
    story = ReportedStartupLog(arguments.report_fd)
    try:
        with alone(config):
            return Supervisor(config, story, surroundings).run()
    except ConfigError as error:
        story.failed(Failure("supervisor", str(error), "", EXIT_CONFIG))
        nursery.end()
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
