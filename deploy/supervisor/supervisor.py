"""The supervisor's loop: signals and messages only enqueue, the loop acts.

BOOTING ──all ready──▶ SERVING ──signal──▶ DRAINING ──drained or too late──▶ STOPPING ──all gone──▶ exit
   │ a failure that       │ exit 78, or too many deaths of one process slot
   │ `Boot` calls fatal   │
   ╰──────────────────────┴──▶ kill everyone, exit 1 or 78

Requests are served from the first engine on, so a server that still boots may drain as well.
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
from quintet.deploy.supervisor.boot import Boot
from quintet.deploy.supervisor.changes import Changes
from quintet.deploy.supervisor.event_loop import EventLoop
from quintet.deploy.supervisor.metrics_refresh import MetricsRefresh
from quintet.deploy.supervisor.prefork import Prefork
from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.deploy.supervisor.restarts import RestartPolicy, policy_of
from quintet.deploy.supervisor.service_manager import ServiceManager
from quintet.deploy.supervisor.spawn import MODULES, Spawner
from quintet.deploy.supervisor.standby import SPARE_ROLES, StandbyProcesses
from quintet.deploy.supervisor.startup_log import Failure, StartupLog, base_url, child_failure
from quintet.deploy.supervisor.watch import STOP_GRACE_S, Watch
from quintet.process.runtime import CONFIG_FILE, SUPERVISOR, error_file
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
"""The loop turns at least so often: what counts is also what does not come."""
_ECHO_S = 0.02
"""Signals this close to the first are the same wish, sent twice: `timeout` signals its child and then its group."""


class Phase(enum.Enum):
    """Where in its life the server is."""

    BOOTING = "booting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class SupervisorContext:
    """What the supervisor is given besides the configuration."""

    listener: socket.socket | None = None
    """Listening socket of the frontends."""
    parent_fd: int | None = None
    """End of a pipe whose other end lives as long as the process that wants this server."""
    modules: Mapping[Role, str] = field(default_factory=lambda: MODULES)
    nursery: Prefork | None = None
    """With children that were forked off before, and wait for slots."""
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    restart_policy: Callable[[Role, int | None], RestartPolicy] = policy_of
    manager: ServiceManager = field(default_factory=lambda: ServiceManager({}))
    look_around: Callable[[float], Failure | None] = lambda now: None
    """Sees to what stands beside the server, at every turn; a failure there ends one that still boots."""


class Supervisor:
    """Owns the slots, the epochs and the topology of one server. Lives in the main thread.

    The run folder is the supervisor's: it is removed when `run` returns.
    """

    def __init__(self, config: EngineConfig, story: StartupLog, surroundings: SupervisorContext) -> None:
        self._config = config
        self._story = story
        self._surroundings = surroundings
        self._run_dir = Path(config.run_dir)
        self._listener = surroundings.listener
        self._log = logging.getLogger("quintet")
        self._slots = SlotTable(self._run_dir, config.processes)
        self._spawner = Spawner(
            self._run_dir, surroundings.modules, self._listener.fileno() if self._listener else None
        )
        self._nursery = surroundings.nursery or Prefork(self._run_dir, self._listener)
        self._bus = Bus(self._run_dir)
        accepts: Any = Ready | Heartbeat | MetricsQuery | Drained | Command
        self._inbox: Inbox[Any] = Inbox(
            self._bus, address_of(self._run_dir, SUPERVISOR), accepts, makes_sense=Validator(config).accepts
        )
        self._peers = Peers(self._bus)
        self._spares = StandbyProcesses(self._spawner, SPARE_ROLES if config.processes.standby else ())
        self._watch = Watch(self._slots, config.processes)
        self._boot_state = Boot(self._slots, story, config.processes.boot_timeout_s)
        self._changes = Changes(self._slots, self._fill, self._peers.send)
        self._lookers = MetricsRefresh(self._slots, self._peers.send)
        self._desk = AdminServer(
            config, self._bus, self._slots, self._changes, has_frontends=self._listener is not None
        )
        self._bell = EventLoop(self._inbox.fileno(), surroundings.signals, surroundings.parent_fd)
        self._phase = Phase.BOOTING
        self._deadline = 0.0
        self._exit_code = 0
        self._finished = False
        self._claim: int | None = None

    def run(self) -> int:
        """Boot, serve until told to stop, and return the exit status. Nothing is left behind."""
        try:
            self._claim = run_dirs.claim(self._run_dir)
            self._config.write(self._run_dir / CONFIG_FILE)
            self._boot()
            while not self._finished:
                self._hear()
                self._obey_signals()
                self._notice_deaths()
                self._keep_deadlines()
                self._changes.advance()
                self._publish()
                self._complete_boot()
                self._surroundings.manager.alive(time.monotonic())
                if not self._finished:
                    patience_s = self._lookers.patience_s(time.monotonic())
                    self._bell.wait(_TICK_S if patience_s is None else min(_TICK_S, patience_s))
            return self._exit_code
        finally:
            self._kill_everyone()
            self._changes.give_up("the server ended")
            self._close()

    # --- what comes in ---

    def _hear(self) -> None:
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
                        self._lookers.heard(worker)
                case MetricsQuery() if message.metrics:
                    self._lookers.ask(message, now)
                case MetricsQuery():
                    self._tell_figures(message, now)
                case Drained(worker=worker):
                    slot = self._slots.of(worker)
                    if slot is not None:
                        slot.is_drained = True
                case Command():
                    self._desk.receive(message, self._phase.value, self._phase is Phase.SERVING, now)
        for query in self._lookers.take(now):
            self._tell_figures(query, now)

    def _tell_figures(self, query: MetricsQuery, now: float) -> None:
        """Answer a frontend, unless it has a successor by now; what it has counted is known before it is shown."""
        slot = self._slots.of(query.asker)
        if slot is None:
            return
        if slot.process is not None:
            slot.metrics = query.metrics or slot.metrics
        report = MetricsReport(query.query_id, self._slots.figures(now), self._slots.past())
        self._peers.send(slot.role, slot.index, report)

    def _obey_signals(self) -> None:
        if self._bell.parent_is_gone and self._phase is not Phase.STOPPING:
            self._stop(0)
        signals = self._bell.take_signals()
        if not signals:
            return
        if self._phase is Phase.SERVING or (self._phase is Phase.BOOTING and self._boot_state.has_served):
            self._bell.swallow_echoes(_ECHO_S)
            drain_timeout_s = self._config.processes.drain_timeout_s
            self._log.info("%s: draining for up to %g s", signals[0].name, drain_timeout_s)
            self._drain()
        else:
            self._log.info("%s while %s: killing everyone", signals[0].name, self._phase.value)
            self._finish(128 + signals[0])

    # --- boot ---

    def _boot(self) -> None:
        for slot in self._slots.own():
            self._fill(slot)

    def _fill(self, slot: SlotRecord) -> None:
        error_file(self._run_dir, slot.worker).unlink(missing_ok=True)
        now = time.monotonic()
        waiting = self._nursery.take(slot.worker) or self._spares.take(slot.worker, now)
        slot.fill(waiting or self._spawner.spawn(slot.worker), now)
        self._slots.is_changed = True

    def _slot_ready(self, slot: SlotRecord, facts: dict[str, str], now: float) -> None:
        slot.became_ready(facts, now)
        self._slots.is_changed = True
        self._boot_state.look()
        if self._phase is not Phase.BOOTING or slot.restarts:
            self._log.info("%s is ready after %.1f s", slot.worker, now - slot.spawned_at)
        if self._phase is Phase.BOOTING:
            self._boot_state.report(slot.role)

    def _complete_boot(self) -> None:
        """Announce that the server is ready, once every process is and the frontends know it."""
        self._boot_state.look()
        if self._phase is Phase.BOOTING and self._boot_state.is_complete():
            self._phase = Phase.SERVING
            self._story.all_ready()
            self._surroundings.manager.ready(base_url(self._config))

    def _fail(self, failure: Failure) -> None:
        self._kill_everyone()
        self._story.failed(failure)
        self._finish(failure.exit_code)

    # --- deaths and silences ---

    def _notice_deaths(self) -> None:
        dead = [
            (slot, exit_status)
            for slot in self._slots.own()
            if slot.process is not None and (exit_status := slot.process.poll()) is not None
        ]
        if dead:
            self._hear()  # their last figures, and whether they became ready
        dead.sort(key=lambda pair: self._time_of_last_words(pair[0]))
        for slot, exit_status in dead:
            was_told_to = slot.stopped_at is not None
            slot.vacate(f"exit status {exit_status}")
            self._slots.is_changed = True
            if self._phase is Phase.STOPPING or slot.is_retiring:
                continue
            if was_told_to:
                self._fill_again(slot)
            elif slot.is_on_trial:
                slot.note = child_failure(self._run_dir, slot, exit_status).cause
                slot.is_on_trial, slot.is_retiring = False, True
            else:
                self._replace(slot, exit_status)
            if self._finished:
                return

    def _time_of_last_words(self, slot: SlotRecord) -> float:
        """Order children that died together: the first to leave word is the cause."""
        words = error_file(self._run_dir, slot.worker)
        return words.stat().st_mtime if words.exists() else float("inf")

    def _replace(self, slot: SlotRecord, exit_status: int) -> None:
        """Plan the restart of a slot whose process died, or give up."""
        failure = child_failure(self._run_dir, slot, exit_status)
        if self._phase is Phase.DRAINING and slot.role is Role.FRONTEND:
            return
        if self._boot_state.is_fatal(slot, exit_status):
            self._fail(failure)
            return
        now = time.monotonic()
        policy = self._surroundings.restart_policy(slot.role, self._config.processes.max_restarts)
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

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        failure = self._surroundings.look_around(now)
        if failure is not None and (self._phase is not Phase.BOOTING or self._boot_state.has_served):
            self._log.warning("%s", failure)
            failure = None
        if self._phase is Phase.BOOTING:
            failure = failure or self._boot_state.lateness(now)
        if failure is not None:
            self._fail(failure)
        elif self._phase is Phase.DRAINING and (not self._undrained() or now > self._deadline):
            if self._undrained():
                self._log.warning("drain timeout: requests are cut off at frontends %s", self._undrained())
            self._stop(0)
        elif self._phase is Phase.STOPPING and (
            now > self._deadline or all(slot.process is None for slot in self._slots.own())
        ):
            self._finish(self._exit_code)
        if self._phase in (Phase.SERVING, Phase.DRAINING):
            self._spares.keep(now)
        if self._phase is not Phase.STOPPING and not self._finished:
            self._watch.look(now)
            for slot in self._slots.own():
                if slot.restart_at is not None and now >= slot.restart_at:
                    self._fill_again(slot)

    def _fill_again(self, slot: SlotRecord) -> None:
        slot.epoch += 1
        slot.restarts += 1
        self._fill(slot)

    def _undrained(self) -> list[int]:
        """Return the frontends that still have something to finish."""
        frontends = (slot for slot in self._slots.own() if slot.role is Role.FRONTEND)
        return [slot.index for slot in frontends if slot.process is not None and not slot.is_drained]

    # --- the end ---

    def _drain(self) -> None:
        self._phase = Phase.DRAINING
        self._changes.give_up("the server is stopping")
        self._close_listener()
        drain_timeout_s = self._config.processes.drain_timeout_s
        self._surroundings.manager.stopping(drain_timeout_s + 2 * STOP_GRACE_S)
        self._deadline = time.monotonic() + drain_timeout_s
        self._slots.is_changed = True
        self._publish()
        for slot in self._slots:
            if slot.role is Role.FRONTEND:
                slot.restart_at = None
                self._peers.send(Role.FRONTEND, slot.index, Drain())

    def _stop(self, exit_code: int) -> None:
        self._phase = Phase.STOPPING
        self._changes.give_up("the server is stopping")
        self._exit_code = exit_code
        self._close_listener()
        self._spares.end()
        self._deadline = time.monotonic() + STOP_GRACE_S
        for slot in self._slots:
            slot.restart_at = None
            self._peers.send(slot.role, slot.index, Stop())

    def _finish(self, exit_code: int) -> None:
        self._exit_code, self._finished = exit_code, True

    def _kill_everyone(self) -> None:
        self._spares.end()
        self._nursery.end()
        living = [slot.process for slot in self._slots.own() if slot.process is not None]
        for process in living:
            process.kill()
        for process in living:
            process.wait()

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
        self._bell.close()
        self._surroundings.manager.close()
        self._close_listener()
        self._inbox.close()
        self._peers.close()
        self._bus.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._claim is not None:
            os.close(self._claim)
