"""Fake child process: it takes its slot, follows the script of the test, and reports events.

Runs in processes started by the supervisor under test; see ``supervised.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from quintet.process.child import child_main
from quintet.process.runtime import Process
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import Drain, Drained, MetricsQuery, MetricsReport, Stop, Topology


def report(event: str, **details: object) -> None:
    """Send one event to the test."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(json.dumps({"event": event, **details}).encode(), os.environ["FAKE_EVENTS"])


def run_as(role: Role) -> None:
    """Run as a child of this role."""
    child_main(role, _run, _prepare)


def _prepare(_config: EngineConfig) -> None:
    report("prepared", pid=os.getpid())


def _run(me: WorkerId, config: EngineConfig, _prepared: None) -> None:
    script = json.loads(Path(os.environ["FAKE_SCRIPT"]).read_text())
    options: dict[str, Any] = {**script.get(f"{me.role}-{me.index}", {}), **script.get(str(me), {})}
    process: Process[Any] = Process(me, config, Stop)
    listen_fd = os.environ.get("QUINTET_LISTEN_FD")
    report("born", me=str(me), pid=os.getpid(), listens=listen_fd is not None)
    if options.get("fail"):
        raise ValueError(options["fail"])
    if "config_error" in options:
        raise ConfigError(options["config_error"])
    if options.get("never_ready"):
        signal.pause()
    steps = process.metrics.counter("steps", "Steps.")
    steps.inc(options.get("steps", 0))
    process.ready(epoch=str(me.epoch))
    if options.get("die_when_ready"):
        process.close()
        os._exit(3)
    if options.get("silent"):
        signal.pause()
    process.pending = options.get("pending", 0)
    try:
        while True:
            for message in process.receive():
                steps.inc(options.get("steps_per_message", 0))
                _handle(process, options, message)
    finally:
        process.close()


def _handle(process: Process[Any], options: dict[str, Any], message: object) -> None:
    me = process.me
    match message:
        case Topology(slots=slots, draining=draining):
            states = {str(slot.worker): slot.state.name for slot in slots}
            report("topology", me=str(me), slots=states, draining=draining)
            if options.get("ask_metrics"):
                process.peers.send(Role.SUPERVISOR, 0, MetricsQuery(7, me, process.metrics.encoded()))
        case MetricsReport(query_id=query_id, processes=processes):
            from quintet.frontend.metrics import collect  # slow to import, and used by few children

            if not all(metrics.metrics for metrics in processes):  # some have not sent metrics yet
                process.peers.send(Role.SUPERVISOR, 0, MetricsQuery(7, me, process.metrics.encoded()))
            metrics = collect(message)
            steps = {
                f"{source.role}-{source.index}": series.value
                for source in metrics
                for series in source.snapshot.counters
                if series.name == "steps"
            }
            workers = [str(metrics.worker) for metrics in processes]
            report("report", query_id=query_id, workers=workers, steps=steps)
        case Drain():
            report("drain", me=str(me))
            if options.get("hang_on_drain"):
                signal.pause()
            if not options.get("never_drained"):
                process.peers.send(Role.SUPERVISOR, 0, Drained(me))
