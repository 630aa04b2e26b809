"""``python -m quintet.deploy.supervisor --run-dir DIR``: run a supervisor for an existing configuration file.

The Python API starts this process and holds the write end of the pipe of ``--parent-fd``. The pipe closes when the
API's process exits for any reason; then the supervisor stops all processes.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import setproctitle

from quintet.deploy.supervisor.prefork import Prefork, roles_to_fork
from quintet.deploy.supervisor.run_dirs import lock_stores
from quintet.deploy.supervisor.startup_log import Failure, ReportedStartupLog
from quintet.deploy.supervisor.supervisor import Supervisor, SupervisorContext
from quintet.process.child import CONFIG_FILE
from quintet.process.log import configure_logging
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError


def main() -> int:
    """Supervise until a stop signal, or until the parent exits."""
    parser = argparse.ArgumentParser(prog="python -m quintet.deploy.supervisor", description=__doc__)
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="folder with config.json; removed at exit"
    )
    parser.add_argument("--parent-fd", type=int, help="read end of a pipe; end of file stops the server")
    parser.add_argument(
        "--report-fd", type=int, help="descriptor for the result of the boot, one line of JSON"
    )
    arguments = parser.parse_args()
    setproctitle.setproctitle("quintet-supervisor")
    config = EngineConfig.read(arguments.run_dir / CONFIG_FILE)
    configure_logging("supervisor", config.log_level)
    prefork = Prefork(arguments.run_dir, None)
    prefork.fork(roles_to_fork(config.executor.kind != "mock", has_frontends=False))
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if arguments.parent_fd is not None:
        # Ctrl-C in a terminal reaches the parent too; the parent decides
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signals.remove(signal.SIGINT)
    context = SupervisorContext(parent_fd=arguments.parent_fd, signals=signals, prefork=prefork)
    startup_log = ReportedStartupLog(arguments.report_fd)
    try:
        with lock_stores(config):
            return Supervisor(config, startup_log, context).run()
    except ConfigError as error:
        startup_log.failed(Failure("supervisor", str(error), "", EXIT_CONFIG))
        prefork.end()
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
