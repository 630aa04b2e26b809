"""A child that only takes its slot. What else it does stands in the script of the test; what it sees, it tells.

Runs in processes of its own, started by the supervisor under test; see ``supervised.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

from quintet.process.runtime import Process, child_main
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.supervision import Drain, Drained, MetricsQuery, MetricsReport, Stop, Topology


def tell(event: str, **details: object) -> None:
    """Send one event to the test."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(json.dumps({"event": event, **details}).encode(), os.environ["FAKE_EVENTS"])


def be(role: Role) -> None:
    """Be a child of this role."""
    child_main(role, _run, _prepare)


def _prepare(_config: EngineConfig) -> None:
    tell("prepared", pid=os.getpid())


def _run(me: WorkerId, config: EngineConfig, _prepared: None) -> None:
    script = json.loads(Path(os.environ["FAKE_SCRIPT"]).read_text())
    mine: dict[str, Any] = {**script.get(f"{me.role}-{me.index}", {}), **script.get(str(me), {})}
    process: Process[Any] = Process(me, config, Stop)
    listen_fd = os.environ.get("QUINTET_LISTEN_FD")
    tell("born", me=str(me), pid=os.getpid(), listens=listen_fd is not None)
    if mine.get("fail"):
        raise ValueError(mine["fail"])
    if "config_error" in mine:
        raise ConfigError(mine["config_error"])
    if mine.get("never_ready"):
        signal.pause()
    steps = process.metrics.counter("steps", "Steps.")
    steps.inc(mine.get("steps", 0))
    process.ready(epoch=str(me.epoch))
    if mine.get("die_when_ready"):
        process.close()
        os._exit(3)
    if mine.get("silent"):
        signal.pause()
    process.pending = mine.get("pending", 0)
    try:
        while True:
            for message in process.receive():
                steps.inc(mine.get("steps_per_message", 0))
                _handle(process, mine, message)
    finally:
        process.close()


def _handle(process: Process[Any], mine: dict[str, Any], message: object) -> None:
    me = process.me
    match message:
        case Topology(slots=slots, draining=draining):
            states = {str(slot.worker): slot.state.name for slot in slots}
            tell("topology", me=str(me), slots=states, draining=draining)
            if mine.get("ask_metrics"):
                process.peers.send(Role.SUPERVISOR, 0, MetricsQuery(7, me, process.metrics.encoded()))
        case MetricsReport(query_id=query_id, processes=processes):
            from quintet.frontend.metrics import collect  # slow to import, and few of the children need it

            if not all(figures.metrics for figures in processes):  # some have not told theirs yet
                process.peers.send(Role.SUPERVISOR, 0, MetricsQuery(7, me, process.metrics.encoded()))
            figures = collect(message)
            steps = {
                f"{source.role}-{source.index}": series.value
                for source in figures
                for series in source.snapshot.counters
                if series.name == "steps"
            }
            workers = [str(figures.worker) for figures in processes]
            tell("report", query_id=query_id, workers=workers, steps=steps)
        case Drain():
            tell("drain", me=str(me))
            if mine.get("hang_on_drain"):
                signal.pause()
            if not mine.get("never_drained"):
                process.peers.send(Role.SUPERVISOR, 0, Drained(me))
