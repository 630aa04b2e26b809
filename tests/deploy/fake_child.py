"""A child that does nothing but take its seat: what it shall do is read from ``<run_dir>/script.json`` and signals.

Started by the supervisor under test as ``python -m fake_child``; the role is given by the module alias that spawned it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Drain, Drained, Topology
from quintet.wire.runtime import Process, child_main


def be(role: Role) -> None:
    """Be a child of this role."""
    child_main(role, _run)


def _run(me: WorkerId, config: EngineConfig) -> None:
    script: dict[str, Any] = json.loads(Path(os.environ["FAKE_SCRIPT"]).read_text())
    mine = script.get(f"{me.role}-{me.index}.{me.epoch}") or script.get(f"{me.role}-{me.index}") or {}
    if "fail" in mine:
        raise ValueError(mine["fail"])
    if "config_error" in mine:
        raise ConfigError(mine["config_error"])
    if "exit" in mine:
        sys.exit(mine["exit"])
    process: Process[Any] = Process(me, config, Topology)
    if "never_ready" in mine:
        signal.pause()
    process.ready(listen=os.environ.get("QUINTET_LISTEN_FD", "none"))
    if "die_when_ready" in mine:
        process.close()
        os._exit(3)
    if "silent" in mine:
        signal.pause()
    process.pending = mine.get("pending", 0)
    while True:
        for message in process.receive():
            if isinstance(message, Topology):
                seats = {str(seat.worker): seat.state.name for seat in message.seats}
                line = {"me": str(me), "seats": seats, "draining": message.draining}
                _append(Path(os.environ["FAKE_LOG"]), json.dumps(line))
            elif isinstance(message, Drain) and "never_drained" not in mine:
                process.peers.send(Role.SUPERVISOR, 0, Drained(me))
            if isinstance(message, Drain) and "ignore_stop" in mine:
                time.sleep(60)


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")
