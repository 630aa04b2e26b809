"""Startup output for an operator: under twenty lines, or one cause of failure."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from quintet.deploy import embedded
from quintet.deploy.supervisor.process_slots import SlotRecord, SlotTable
from quintet.process.child import error_file
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG
from quintet.wire.ids import Role
from quintet.wire.supervision import SlotState


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause of a failed boot, or of a server that gave up."""

    role: str
    cause: str
    hint: str
    exit_code: int

    def __str__(self) -> str:
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{self.role}: {self.cause}{hint}"


class StartupLog(Protocol):
    """Receives the events of the boot."""

    def role_ready(self, slots: Sequence[SlotRecord]) -> None:
        """Report that all processes of one role are ready."""

    def all_ready(self) -> None:
        """Report that the server accepts requests."""

    def failed(self, failure: Failure) -> None:
        """Report that the server exits with ``failure.exit_code``."""


class PrintedStartupLog:
    """Prints the events of the boot on a terminal."""

    def __init__(self, config: EngineConfig, opening: Sequence[str], out: TextIO | None = None) -> None:
        self._config = config
        self._out = sys.stdout if out is None else out
        self._started_at = time.monotonic()
        for line in opening:
            self._print(line)

    def role_ready(self, slots: Sequence[SlotRecord]) -> None:
        """Print the boot time of the role and the facts that its first process reported."""
        slowest = max((slot.ready_at or slot.spawned_at) - slot.spawned_at for slot in slots)
        name = slots[0].role + (f" ×{len(slots)}" if len(slots) > 1 else "")
        facts = ", ".join(f"{name}: {value}" for name, value in slots[0].facts.items())
        self._print(f"  {name:<14} {slowest:5.1f} s  {facts}".rstrip())

    def all_ready(self) -> None:
        """Print the server's URL and example commands."""
        seconds = time.monotonic() - self._started_at
        url = base_url(self._config)
        self._print(f"All processes ready after {seconds:.1f} s. Try:")
        if can_chat(self._config) and not self._config.frontend.uds:
            self._print(f"  {chat_line(self._config)}")
        self._print(f"  {curl_line(self._config)}")
        self._print(f"Quintet is ready: {url}")

    def failed(self, failure: Failure) -> None:
        """Print the cause on stderr."""
        self._out.flush()
        print(f"quintet: {failure}", file=sys.stderr, flush=True)

    def _print(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a closed stdout does not stop the server
            # a single write: child processes write to the same terminal
            self._out.write(line + "\n")
            self._out.flush()


class ReportedStartupLog:
    """Reports the result of the boot to a program: one JSON line, ``{"ready": true}`` or ``{"error": "…"}``."""

    def __init__(self, report_fd: int | None) -> None:
        self._report_fd = report_fd

    def role_ready(self, slots: Sequence[SlotRecord]) -> None: ...

    def all_ready(self) -> None:
        self._report({"ready": True})

    def failed(self, failure: Failure) -> None:
        """Report the cause; print it on stderr when the pipe is closed."""
        if not self._report({"error": str(failure), "exit_code": failure.exit_code}):
            print(f"quintet: {failure}", file=sys.stderr, flush=True)

    def _report(self, message: dict[str, object]) -> bool:
        """Write the line. Return False when it was already written, or the pipe is closed."""
        if self._report_fd is None:
            return False
        descriptor, self._report_fd = self._report_fd, None
        try:
            with os.fdopen(descriptor, "w") as pipe:
                pipe.write(json.dumps(message) + "\n")
        except BrokenPipeError:
            return False
        return True


def base_url(config: EngineConfig) -> str:
    """Return the server's URL for a client on this host."""
    if config.frontend.uds:
        return f"unix:{config.frontend.uds}"
    host = config.frontend.host
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if config.frontend.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.frontend.port}"


def can_chat(config: EngineConfig) -> bool:
    """Return whether the model supports chat: it has a chat template, and is not the embedded toy model."""
    is_toy = Path(config.model.path) == embedded.default_model_path()
    return "default" in config.model.chat_templates and not is_toy


def chat_line(config: EngineConfig) -> str:
    """Return a command that starts a chat in the terminal."""
    url = base_url(config)
    program = (
        "quintet" if shutil.which("quintet") else shlex.quote(str(Path(sys.executable).with_name("quintet")))
    )
    line = f"{program} chat" + ("" if url == "http://127.0.0.1:8000" else f" --url {url}")
    return line + (" --api-key $YOUR_API_KEY" if config.frontend.api_keys else "")


def curl_line(config: EngineConfig) -> str:
    """Return a curl command that streams a completion from the server."""
    body: dict[str, object] = {"model": config.model.served_names[0]}
    if can_chat(config):
        route = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello! Who are you?"}]
        body["temperature"] = 0.7
    else:
        route = "/v1/completions"
        body |= {"prompt": "def fibonacci(n):", "temperature": 0}
    body |= {"max_tokens": 64, "stream": True}
    key = ' -H "Authorization: Bearer $YOUR_API_KEY"' if config.frontend.api_keys else ""
    url, options = base_url(config), ""
    if config.frontend.uds:
        options = f"--unix-socket {shlex.quote(config.frontend.uds)} "
        url = "https://localhost" if config.frontend.ssl_certfile else "http://localhost"
    elif "[" in url:
        options = "-g "
    if config.frontend.ssl_certfile:
        options += f"--cacert {shlex.quote(config.frontend.ssl_certfile)} "
    return (
        f"curl -N {options}{url}{route} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}"
    )


def child_failure(run_dir: Path, slot: SlotRecord, exit_status: int) -> Failure:
    """Return the failure of a child: its first exception if it wrote one, otherwise its exit status."""
    error_text = ""
    with contextlib.suppress(OSError):  # no such file, or no free descriptor
        error_text = error_file(run_dir, slot.worker).read_text().strip()
    cause = error_text or f"the process {_ending(exit_status)} without an error message"
    hint = "" if exit_status == EXIT_CONFIG else _hint(slot.role, exit_status, error_text)
    return Failure(f"{slot.role} {slot.index}", cause, hint, EXIT_CONFIG if exit_status == EXIT_CONFIG else 1)


def _ending(exit_status: int) -> str:
    if exit_status >= 0:
        return f"exited with status {exit_status}"
    try:
        return f"was killed by {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"was killed by signal {-exit_status}"


def _hint(role: Role, exit_status: int, error_text: str) -> str:
    if exit_status == -signal.SIGKILL or "MemoryError" in error_text or "out of memory" in error_text:
        return "probably out of memory: try a smaller --kv-cache-memory, --max-model-len or --max-num-seqs"
    if error_text.startswith(("ModuleNotFoundError", "ImportError")):
        return "the installation is incomplete: run `make install`, then `quintet collect-env`"
    if role is Role.EXECUTOR:
        return "the traceback is above; `quintet serve --executor mock` tests the server without the executor"
    return "the traceback is above; --log-level DEBUG prints more detail"


class Boot:
    """State of the boot, read from the process slots; reports each role to the startup log, once.

    a process dies that was ready                  restart
    a process dies that was never ready            fatal until `has_served`; then restart, a few times
    a slot is not ready within the boot timeout    fatal if no process of the slot was ready before
    exit status 78 (configuration)                 always fatal
    """

    def __init__(self, slots: SlotTable, startup_log: StartupLog, timeout_s: float) -> None:
        self._slots = slots
        self._startup_log = startup_log
        self._timeout_s = timeout_s
        self._reported: set[Role] = set()
        self.has_served = False
        """True once a frontend may have answered /readyz with 200. Never reset."""

    def update(self) -> None:
        """Update `has_served`. Call before the slot of a dead process is vacated."""
        if not self.has_served:
            self.has_served = self._can_serve()

    def _can_serve(self) -> bool:
        ready = {(slot.role, slot.index) for slot in self._slots.own() if slot.state is SlotState.READY}
        engines = [index for role, index in ready if role is Role.CORE and (Role.EXECUTOR, index) in ready]
        roles = {role for role, _ in ready}
        return bool(engines) and roles.issuperset((Role.TOKENIZER, Role.DETOKENIZER, Role.FRONTEND))

    def report(self, role: Role) -> None:
        """Report a role to the startup log the first time that all its processes are ready."""
        siblings = [slot for slot in self._slots.own() if slot.role is role]
        if role not in self._reported and all(slot.state is SlotState.READY for slot in siblings):
            self._reported.add(role)
            self._startup_log.role_ready(siblings)

    def is_complete(self) -> bool:
        """True if all processes are ready and all frontends have acknowledged it, so none rejects the first request."""
        version = self._slots.version
        return all(
            slot.state is SlotState.READY and (slot.role is not Role.FRONTEND or slot.topology == version)
            for slot in self._slots.own()
        )

    def is_fatal(self, slot: SlotRecord, exit_status: int) -> bool:
        """True if the death of a slot's process ends the server at once."""
        return exit_status == EXIT_CONFIG or not (slot.was_ready or self.has_served)

    def timeout_failure(self, now: float) -> Failure | None:
        """Return the failure for slots that were never ready and exceeded the boot timeout, if any."""
        late = [
            slot
            for slot in self._slots.own()
            if not slot.was_ready and slot.process is not None and now - slot.spawned_at > self._timeout_s
        ]
        if not late:
            return None
        names = ", ".join(str(slot.worker) for slot in late)
        hint = "raise --boot-timeout, or see the log above"
        return Failure(names, f"not ready within {self._timeout_s:g} s", hint, 1)
