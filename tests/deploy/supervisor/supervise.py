"""Program under test: a supervisor with a spawn table of fake children."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.supervisor.fake_child import report

from quintet.deploy.supervisor.listener import bind_listener
from quintet.deploy.supervisor.prefork import Prefork, roles_to_fork
from quintet.deploy.supervisor.process_slots import SlotRecord
from quintet.deploy.supervisor.restarts import RestartPolicy
from quintet.deploy.supervisor.service_manager import ServiceManager
from quintet.deploy.supervisor.spawn import Spawner
from quintet.deploy.supervisor.startup_log import Failure, PrintedStartupLog, ReportedStartupLog
from quintet.deploy.supervisor.supervisor import Supervisor, SupervisorContext
from quintet.process.child import CONFIG_FILE
from quintet.process.log import configure_logging
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId


class ObservedStartupLog(PrintedStartupLog):
    """Prints the startup log, and reports it to the test."""

    def role_ready(self, slots: Sequence[SlotRecord]) -> None:
        super().role_ready(slots)
        report("role_ready", role=slots[0].role)

    def all_ready(self) -> None:
        super().all_ready()
        report("all_ready")

    def failed(self, failure: Failure) -> None:
        super().failed(failure)
        report("failed", cause=failure.cause)


def refuse(workers: Sequence[str]) -> None:
    """Refuse to start these processes, like a system at its limit of processes."""
    spawn = Spawner.spawn

    def spawn_or_refuse(spawner: Spawner, worker: WorkerId) -> subprocess.Popen[bytes]:
        if str(worker) in workers:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return spawn(spawner, worker)

    Spawner.spawn = spawn_or_refuse  # type: ignore[method-assign]


def main() -> int:
    run_dir, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    config = EngineConfig.read(run_dir / CONFIG_FILE)
    configure_logging("supervisor", "INFO")
    listener = bind_listener("127.0.0.1", 0) if config.processes.frontends else None
    if listener is not None:
        report("listening", port=listener.getsockname()[1])
    modules = {role: f"fake_{role}" for role in Role}
    prefork = Prefork(run_dir, listener, modules)
    refuse(options.get("refused", []))
    if options.get("forks"):
        prefork.fork(roles_to_fork(True, has_frontends=listener is not None))
    context = SupervisorContext(
        listener=listener,
        parent_fd=options.get("parent_fd"),
        modules=modules,
        prefork=prefork,
        manager=ServiceManager(os.environ),
        restart_policy=lambda _role, _max_deaths: RestartPolicy(
            max_deaths=options.get("max_deaths", 5), first_backoff_s=0.01
        ),
        check_external=lambda now: (
            Failure("external", options["external"], "", 78) if "external" in options else None
        ),
    )
    startup_log = (
        ReportedStartupLog(options["report_fd"])
        if "report_fd" in options
        else ObservedStartupLog(config, ["Fake model"])
    )
    return Supervisor(config, startup_log, context).run()


if __name__ == "__main__":
    sys.exit(main())
