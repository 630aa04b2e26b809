"""The supervisor's main loop. Signals and messages are only queued; the loop acts on them.

BOOTING ──all ready──▶ SERVING ──signal──▶ DRAINING ──drained or timeout──▶ STOPPING ──all exited──▶ exit
   │ failure that         │ exit status 78, or restart limit of a slot exceeded
   │ `Boot` calls fatal   │
   ╰──────────────────────┴──▶ kill all processes, exit with 1 or 78

Requests are served as soon as one engine is ready, so a booting server may drain too.
"""

from __future__ import annotations

import enum
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.deploy.supervisor import run_dirs
from quintet.deploy.supervisor.admin_server import AdminServer
from quintet.deploy.supervisor.changes import Changes
from quintet.deploy.supervisor.event_loop import EventLoop
from quintet.deploy.supervisor.prefork import Prefork
from quintet.deploy.supervisor.process_slots import MetricsRefresh, SlotRecord, SlotTable
from quintet.deploy.supervisor.restarts import RestartPolicy, policy_of
from quintet.deploy.supervisor.service_manager import ServiceManager
from quintet.deploy.supervisor.spawn import MODULES, STANDBY_ROLES, Spawner, StandbyProcesses, end_processes
from quintet.deploy.supervisor.startup_log import Boot, Failure, StartupLog, base_url, child_failure
from quintet.deploy.supervisor.watch import STOP_GRACE_S, Watch
from quintet.process.child import CONFIG_FILE, error_file
from quintet.process.runtime import SUPERVISOR
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role
from quintet.wire.supervision import (
    Command,
    Drain,
    Drained,
    Heartbeat,
    MetricsQuery,
    MetricsReport,
    Ready,
    SlotState,
    Stop,
)
from quintet.wire.validate import Validator

_TICK_S = 0.2
"""Maximum time between two iterations of the loop; timeouts are detected by iterating."""
_DUPLICATE_SIGNAL_S = 0.02
"""Signals within this time of the first are duplicates: `timeout` signals its child and then its process group."""


class Phase(enum.Enum):
    BOOTING = "booting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class SupervisorContext:
    """Dependencies of the supervisor besides the configuration."""

    listener: socket.socket | None = None
    """Listening socket of the frontends."""
    parent_fd: int | None = None
    """Read end of a pipe; the parent process holds the write end. End of file stops the server."""
    modules: Mapping[Role, str] = field(default_factory=lambda: MODULES)
    prefork: Prefork | None = None
    """Holds preforked children that wait for slots."""
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    restart_policy: Callable[[Role, int | None], RestartPolicy] = policy_of
    manager: ServiceManager = field(default_factory=lambda: ServiceManager({}))
    check_external: Callable[[float], Failure | None] = lambda now: None
    """Checks external dependencies in every iteration of the loop; a failure ends a server that still boots."""


class Supervisor:
    """Owns the slots, the epochs and the topology of one server. Must run in the main thread.

    The supervisor owns the run folder and removes it when `run` returns.
    """

    def __init__(self, config: EngineConfig, startup_log: StartupLog, context: SupervisorContext) -> None:
        self._config = config
        self._startup_log = startup_log
        self._context = context
        self._run_dir = Path(config.run_dir)
        self._listener = context.listener
        self._log = logging.getLogger("quintet")
        self._slots = SlotTable(self._run_dir, config.processes)
        self._spawner = Spawner(
            self._run_dir, context.modules, self._listener.fileno() if self._listener else None
        )
        self._prefork = context.prefork or Prefork(self._run_dir, self._listener)
        self._bus = Bus(self._run_dir)
        accepts: Any = Ready | Heartbeat | MetricsQuery | Drained | Command
        self._inbox: Inbox[Any] = Inbox(
            self._bus, address_of(self._run_dir, SUPERVISOR), accepts, is_valid=Validator(config).accepts
        )
        self._peers = Peers(self._bus)
        self._standby = StandbyProcesses(self._spawner, STANDBY_ROLES if config.processes.standby else ())
        self._watch = Watch(self._slots, config.processes)
        self._boot_state = Boot(self._slots, startup_log, config.processes.boot_timeout_s)
        self._changes = Changes(self._slots, self._fill, self._peers.send)
        self._metrics_refresh = MetricsRefresh(self._slots, self._peers.send)
        self._admin_server = AdminServer(
            config, self._bus, self._slots, self._changes, has_frontends=self._listener is not None
        )
        self._event_loop = EventLoop(self._inbox.fileno(), context.signals, context.parent_fd)
        self._phase = Phase.BOOTING
        self._deadline = 0.0
        self._exit_code = 0
        self._finished = False
        self._claim: int | None = None

    def run(self) -> int:
        """Boot, serve until stopped, and return the exit status. All processes and the run folder are removed."""
        try:
            self._claim = run_dirs.claim(self._run_dir)
            self._config.write(self._run_dir / CONFIG_FILE)
            self._boot()
            while not self._finished:
                self._receive_messages()
                self._handle_signals()
                self._handle_exits()
                self._check_timeouts()
                self._changes.advance()
                self._publish()
                self._complete_boot()
                self._context.manager.alive(time.monotonic())
                if not self._finished:
                    remaining_s = self._metrics_refresh.remaining_s(time.monotonic())
                    self._event_loop.wait(_TICK_S if remaining_s is None else min(_TICK_S, remaining_s))
            return self._exit_code
        finally:
            self._kill_all()
            self._changes.cancel("the server ended")
            self._close()

    # --- messages and signals ---

    def _receive_messages(self) -> None:
        now = time.monotonic()
        for message in self._inbox.drain():
            match message:
                case Ready(worker=worker, facts=facts):
                    slot = self._slots.of(worker)
                    if slot is not None and slot.state is SlotState.STARTING:
                        self._slot_ready(slot, facts, now)
                case Heartbeat(worker=worker):
                    slot = self._slots.of(worker)
                    if slot is not None and slot.process is not None:
                        slot.beat(message, now)
                        self._metrics_refresh.record_heartbeat(worker)
                case MetricsQuery() if message.metrics:
                    self._metrics_refresh.ask(message, now)
                case MetricsQuery():
                    self._send_metrics(message, now)
                case Drained(worker=worker):
                    slot = self._slots.of(worker)
                    if slot is not None:
                        slot.is_drained = True
                case Command():
                    self._admin_server.receive(message, self._phase.value, self._phase is Phase.SERVING, now)
        for query in self._metrics_refresh.take(now):
            self._send_metrics(query, now)

    def _send_metrics(self, query: MetricsQuery, now: float) -> None:
        """Send all metrics to the asking frontend, unless it has been replaced. Its own counts are stored first."""
        slot = self._slots.of(query.asker)
        if slot is None:
            return
        if slot.process is not None:
            slot.metrics = query.metrics or slot.metrics
        report = MetricsReport(query.query_id, self._slots.process_metrics(now), self._slots.past())
        self._peers.send(slot.role, slot.index, report)

    def _handle_signals(self) -> None:
        if self._event_loop.parent_exited and self._phase is not Phase.STOPPING:
            self._stop(0)
        signals = self._event_loop.take_signals()
        if not signals:
            return
        if self._phase is Phase.SERVING or (self._phase is Phase.BOOTING and self._boot_state.has_served):
            self._event_loop.discard_signals(_DUPLICATE_SIGNAL_S)
            drain_timeout_s = self._config.processes.drain_timeout_s
            self._log.info("%s: draining for up to %g s", signals[0].name, drain_timeout_s)
            self._drain()
        else:
            self._log.info("%s while %s: killing all processes", signals[0].name, self._phase.value)
            self._finish(128 + signals[0])

    # --- boot ---

    def _boot(self) -> None:
        for slot in self._slots.own():
            self._start(slot)

    def _start(self, slot: SlotRecord) -> None:
        """Start a process in a slot, unless the server has failed. A refused start counts as a death."""
        if not (self._finished or self._fill(slot)):
            hint = "see the limits of processes, memory and open files"
            self._schedule_restart(slot, Failure(f"{slot.role} {slot.index}", slot.note, hint, 1))

    def _fill(self, slot: SlotRecord) -> bool:
        """Start a process in a slot. Return False if the system refuses; ``slot.note`` has the cause."""
        now = time.monotonic()
        try:
            error_file(self._run_dir, slot.worker).unlink(missing_ok=True)
            waiting = self._prefork.take(slot.worker) or self._standby.take(slot.worker, now)
            slot.fill(waiting or self._spawner.spawn(slot.worker), now)
        except OSError as error:
            slot.note = f"the process could not be started: {error}"
        self._slots.is_changed = True
        return slot.process is not None

    def _slot_ready(self, slot: SlotRecord, facts: dict[str, str], now: float) -> None:
        slot.became_ready(facts, now)
        self._slots.is_changed = True
        self._boot_state.update()
        if self._phase is not Phase.BOOTING or slot.restarts:
            self._log.info("%s is ready after %.1f s", slot.worker, now - slot.spawned_at)
        if self._phase is Phase.BOOTING:
            self._boot_state.report(slot.role)

    def _complete_boot(self) -> None:
        """Report the server as ready once all processes are ready and the frontends have acknowledged it."""
        self._boot_state.update()
        if self._phase is Phase.BOOTING and self._boot_state.is_complete():
            self._phase = Phase.SERVING
            self._startup_log.all_ready()
            self._context.manager.ready(base_url(self._config))

    def _fail(self, failure: Failure) -> None:
        self._kill_all()
        self._startup_log.failed(failure)
        self._finish(failure.exit_code)

    # --- exits and timeouts ---

    def _handle_exits(self) -> None:
        dead = [
            (slot, exit_status)
            for slot in self._slots.own()
            if slot.process is not None and (exit_status := slot.process.poll()) is not None
        ]
        if dead:
            self._receive_messages()  # last metrics and readiness of the exited processes
        dead.sort(key=lambda pair: self._error_time(pair[0]))
        for slot, exit_status in dead:
            is_requested_stop = slot.stopped_at is not None
            slot.vacate(f"exit status {exit_status}")
            self._slots.is_changed = True
            if self._phase is Phase.STOPPING or slot.is_retiring:
                continue
            if is_requested_stop:
                self._restart(slot)
            elif slot.is_booting_new:
                slot.note = child_failure(self._run_dir, slot, exit_status).cause
                slot.is_booting_new, slot.is_retiring = False, True
            else:
                self._schedule_restart(slot, child_failure(self._run_dir, slot, exit_status))
            if self._finished:
                return

    def _error_time(self, slot: SlotRecord) -> float:
        """Return the time of the child's error file. Of children that died together, the earliest is the cause."""
        path = error_file(self._run_dir, slot.worker)
        return path.stat().st_mtime if path.exists() else float("inf")

    def _schedule_restart(self, slot: SlotRecord, failure: Failure) -> None:
        """Schedule the restart of a slot with a dead process, or fail the server."""
        if self._phase is Phase.DRAINING and slot.role is Role.FRONTEND:
            return
        if self._boot_state.is_fatal(slot, failure.exit_code):
            self._fail(failure)
            return
        now = time.monotonic()
        policy = self._context.restart_policy(slot.role, self._config.processes.max_restarts)
        delay_s = policy.delay_s(slot.deaths, now, was_ready=slot.was_ready)
        if delay_s is None:
            within = f"within {policy.window_s:.0f} s" if slot.was_ready else "and was never ready"
            cause = f"died {len(slot.deaths)} times {within}, giving up; last: {failure.cause}"
            self._fail(Failure(failure.role, cause, failure.hint, 1))
            return
        self._log.warning(
            "%s died (%s); starting it again %s",
            slot.worker, failure.cause, f"in {delay_s:.1f} s" if delay_s else "at once",
        )  # fmt: skip
        slot.restart_at = now + delay_s

    def _check_timeouts(self) -> None:
        now = time.monotonic()
        failure = self._context.check_external(now)
        if failure is not None and (self._phase is not Phase.BOOTING or self._boot_state.has_served):
            self._log.warning("%s", failure)
            failure = None
        if self._phase is Phase.BOOTING:
            failure = failure or self._boot_state.timeout_failure(now)
        if failure is not None:
            self._fail(failure)
        elif self._phase is Phase.DRAINING and (not self._undrained() or now > self._deadline):
            if self._undrained():
                self._log.warning("drain timeout: requests are aborted at frontends %s", self._undrained())
            self._stop(0)
        elif self._phase is Phase.STOPPING and (
            now > self._deadline or all(slot.process is None for slot in self._slots.own())
        ):
            self._finish(self._exit_code)
        if self._phase in (Phase.SERVING, Phase.DRAINING):
            self._standby.replenish(now)
        if self._phase is not Phase.STOPPING and not self._finished:
            self._watch.check(now)
            for slot in self._slots.own():
                if slot.restart_at is not None and now >= slot.restart_at:
                    self._restart(slot)

    def _restart(self, slot: SlotRecord) -> None:
        slot.epoch += 1
        slot.restarts += 1
        self._start(slot)

    def _undrained(self) -> list[int]:
        """Return the indexes of the frontends with requests in flight."""
        frontends = (slot for slot in self._slots.own() if slot.role is Role.FRONTEND)
        return [slot.index for slot in frontends if slot.process is not None and not slot.is_drained]

    # --- drain and stop ---

    def _drain(self) -> None:
        self._phase = Phase.DRAINING
        self._changes.cancel("the server is stopping")
        self._close_listener()
        drain_timeout_s = self._config.processes.drain_timeout_s
        self._context.manager.stopping(drain_timeout_s + 2 * STOP_GRACE_S)
        self._deadline = time.monotonic() + drain_timeout_s
        self._slots.is_changed = True
        self._publish()
        for slot in self._slots:
            if slot.role is Role.FRONTEND:
                slot.restart_at = None
                self._peers.send(Role.FRONTEND, slot.index, Drain())

    def _stop(self, exit_code: int) -> None:
        self._phase = Phase.STOPPING
        self._changes.cancel("the server is stopping")
        self._exit_code = exit_code
        self._close_listener()
        self._standby.end()
        self._deadline = time.monotonic() + STOP_GRACE_S
        for slot in self._slots:
            slot.restart_at = None
            self._peers.send(slot.role, slot.index, Stop())

    def _finish(self, exit_code: int) -> None:
        self._exit_code, self._finished = exit_code, True

    def _kill_all(self) -> None:
        self._standby.end()
        self._prefork.end()
        end_processes([slot.process for slot in self._slots.own() if slot.process is not None])

    def _publish(self) -> None:
        if self._slots.is_changed:
            topology = self._slots.topology(self._phase in (Phase.DRAINING, Phase.STOPPING))
            self._peers.follow(topology.slots)
            for slot in self._slots:
                if slot.state is not SlotState.DOWN:
                    self._peers.send(slot.role, slot.index, topology)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _close(self) -> None:
        self._event_loop.close()
        self._context.manager.close()
        self._close_listener()
        self._inbox.close()
        self._peers.close()
        self._bus.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._claim is not None:
            os.close(self._claim)
