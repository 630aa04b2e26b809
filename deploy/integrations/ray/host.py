"""Ray actors: threads of an engine, and the actor of a worker host, which runs `quintet serve --headless` on its node."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import ray
import yaml

from quintet.deploy.supervisor.run_dirs import make_run_dir


def with_assigned_threads(flags: Mapping[str, object]) -> dict[str, object]:
    """Set ``threads`` to the actor's assigned CPUs unless set, so that actors of one node do not oversubscribe cores.

    GPUs need no setting: Ray makes only the assigned ones visible.
    """
    assigned = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
    if "threads" in flags or assigned < 1:
        return dict(flags)
    return {**flags, "threads": math.ceil(assigned)}


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit of a host process."""

    address: str
    """Address of the node."""
    status: int
    words: str
    """Message of a configuration error; empty without one."""


class Host:
    """Actor for one start of the host. Methods may run in several threads."""

    def __init__(self) -> None:
        self._lifeline = contextlib.ExitStack()
        """Owns the lifeline pipe; its end of file stops the host."""

    def end(self) -> None:
        """Stop the host; `run` returns."""
        self._lifeline.close()

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def run(self, flags: Mapping[str, str | int | bool], key: bytes) -> Ended:
        """Run the host until it exits. The key is passed in a file with mode 600, not in logs or arguments."""
        folder = make_run_dir()
        (parent_read, parent_write), (message_read, message_write) = os.pipe(), os.pipe()
        self._lifeline.callback(os.close, parent_write)
        try:
            key_file, config = folder / "group.key", folder / "server.yaml"
            with open(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(key)
            config.write_text(yaml.safe_dump({**flags, "group_key": str(key_file)}))
            command = [
                sys.executable,
                "-P",
                "-m",
                "quintet.deploy.integrations.ray.child",
                "--config",
                str(config),
            ]
            process = subprocess.Popen(
                [*command, "--parent-fd", str(parent_read), "--message-fd", str(message_write)],
                pass_fds=[parent_read, message_write],
            )
            os.close(message_write)
            with open(message_read, encoding="utf-8", closefd=False) as messages:
                message = messages.read()
            return Ended(self.address(), process.wait(), message)
        finally:
            self.end()
            os.close(parent_read)
            os.close(message_read)
            shutil.rmtree(folder, ignore_errors=True)
