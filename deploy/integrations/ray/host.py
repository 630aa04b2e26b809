"""The actor of a host that is not the first: `quintet serve --headless` on its node, which ends when the actor does."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import ray
import yaml

from quintet.process.sockets import make_run_dir


@dataclass(frozen=True, slots=True)
class Ended:
    """How a host came to its end by itself."""

    address: str
    """Of its node."""
    status: int
    words: str
    """Why it cannot be a host; none where it did not say."""


class Host:
    """Made anew for each time that the host is started. Its calls may be in several threads."""

    def __init__(self) -> None:
        self._life = contextlib.ExitStack()
        """Holds the pipe by which the host lives."""

    def end(self) -> None:
        """End the host; `run` returns."""
        self._life.close()

    def address(self) -> str:
        """Return that of the node."""
        return str(ray.util.get_node_ip_address())

    def run(self, flags: Mapping[str, str | int | bool], key: bytes) -> Ended:
        """Be a host for as long as it lives. The key is in a file that its user alone can read, in no log and no command."""
        folder = make_run_dir()
        (held, lifeline), (words, written) = os.pipe(), os.pipe()
        self._life.callback(os.close, lifeline)
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
                [*command, "--parent-fd", str(held), "--words-fd", str(written)], pass_fds=[held, written]
            )
            os.close(written)
            with open(words, encoding="utf-8", closefd=False) as file_of_words:
                said = file_of_words.read()
            return Ended(self.address(), process.wait(), said)
        finally:
            self.end()
            os.close(held)
            os.close(words)
            shutil.rmtree(folder, ignore_errors=True)
