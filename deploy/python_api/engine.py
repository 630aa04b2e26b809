"""Local server processes for the Python API; the calling process acts as frontend 0, without HTTP.

    this process ──── pipe ────▶ supervisor ──▶ tokenizer, core, executor, detokenizer
         └──────── ZeroMQ, like any frontend ────────┘

The supervisor holds the read end of a pipe from this process. When this process ends, also by a crash, the pipe closes and the
supervisor stops all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flag_table import derive_max_num_seqs, make_options
from quintet.deploy.config.flags import Options
from quintet.deploy.python_api.inputs import ReadPrompt, default_params, read_params, read_priority
from quintet.deploy.supervisor import run_dirs
from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.frontend.inbox_handlers import REPORT_INTERVAL_S, FrontendInbox, InboxHandlers
from quintet.frontend.streams import Mailbox, Stream
from quintet.process.child import CONFIG_FILE
from quintet.process.os_tuning import open_standard_streams
from quintet.process.runtime import SUPERVISOR
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire.config import EngineConfig
from quintet.wire.errors import EXIT_CONFIG, ConfigError, ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.limits import largest_frame, largest_frames
from quintet.wire.params import OutputKind, SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.supervision import Drain, MetricsReport, Stop, Topology
from quintet.wire.validate import Validator

log = logging.getLogger(__name__)

_REPORT_SLACK_S = 30.0
_STOP_S = 10.0
_POLL_S = 1.0
ResultT = TypeVar("ResultT")
WAS_SHUT_DOWN = "this engine was shut down"


class EngineError(RuntimeError):
    """The engine processes could not be started, or have stopped; the message contains their error."""


def options_of_call(model: str | None, flags: Mapping[str, object], source: str) -> Options:
    """Return the options of a constructor call; the default log level is WARNING."""
    settings, _ = derive_max_num_seqs({"log_level": "WARNING", **flags, "model": model})
    return make_options(settings, source)


async def gathered(coroutines: Iterable[Coroutine[None, None, ResultT]]) -> list[ResultT]:
    """Run coroutines concurrently, and return their results; the first error cancels the others."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class SupervisorProcess:
    """The supervisor process, a child of this process and parent of all others."""

    def __init__(self, config: EngineConfig) -> None:
        """Start it; call `wait_until_ready` next."""
        open_standard_streams()
        config.write(Path(config.run_dir) / CONFIG_FILE)
        self._boot_timeout_s = config.processes.boot_timeout_s + _REPORT_SLACK_S
        parent_read, parent_write = os.pipe()
        self._parent_write: int | None = parent_write
        process = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_parent_pipe(process()))
        self._report_read, report_write = os.pipe()
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "quintet.deploy.supervisor",
                    "--run-dir", config.run_dir,
                    "--parent-fd", str(parent_read),
                    "--report-fd", str(report_write),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(parent_read, report_write),
                process_group=0,
            )  # fmt: skip
        finally:
            os.close(parent_read)
            os.close(report_write)
        self.exit_fd = os.pidfd_open(self.process.pid)
        """Becomes readable when the supervisor ends."""

    def wait_until_ready(self) -> None:
        """Wait for the supervisor's report. Raises `ConfigError` or `EngineError` with the error of the failed process."""
        with os.fdopen(self._report_read, "rb") as report:
            poll = select.poll()
            poll.register(report, select.POLLIN)
            readable = poll.poll(1000 * self._boot_timeout_s)
            line = report.readline() if readable else b""
        if not readable:
            raise EngineError(
                f"the engine was not ready within {self._boot_timeout_s:g} s; raise boot_timeout"
            )
        if not line:
            raise EngineError(f"the supervisor exited without a report (exit status {self.process.wait()})")
        report_fields: dict[str, object] = json.loads(line)
        if report_fields.get("ready") is not True:
            self.process.wait()
            kind = ConfigError if report_fields.get("exit_code") == EXIT_CONFIG else EngineError
            raise kind(str(report_fields.get("error")))

    def stop(self) -> None:
        """Stop all processes, and wait for the supervisor to end. Call `close` next."""
        _close_parent_pipe(self)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        os.close(self.exit_fd)


def _close_parent_pipe(supervisor: SupervisorProcess | None) -> None:
    """Close this process's end of the pipe; a forked child that kept a copy would keep the supervisor running."""
    if supervisor is not None and supervisor._parent_write is not None:
        os.close(supervisor._parent_write)
        supervisor._parent_write = None


class LocalServer:
    """Live requests and queries of this process as a frontend. Bound to one event loop at a time by `attach`."""

    def __init__(self, options: Options) -> None:
        """Start the processes and wait until they are ready. Raises `ConfigError` or `EngineError`."""
        run_dirs.sweep_stale()
        run_dir = make_run_dir()
        try:
            resolution = resolve(options, run_dir, http=False, external_frontends=1)
            for note in resolution.notes:
                log.warning("%s", note)
            self.config = resolution.config
            me = WorkerId(Role.FRONTEND, self.config.processes.frontends, 1)
            self._bus = Bus(run_dir)
            accepts: Any = FrontendInbox | MetricsReport | Topology | Drain | Stop
            self._inbox: Inbox[Any] = Inbox(
                self._bus,
                address_of(run_dir, me),
                accepts,
                largest_frame(Role.FRONTEND, self.config),
                Validator(self.config).accepts,
            )
            self._peers = Peers(self._bus, largest_frames(self.config))
        except BaseException:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
        self._peers.connect(SUPERVISOR, address_of(run_dir, SUPERVISOR))
        self._dispatch = InboxHandlers(me, self._peers.send, self.config)
        self._dispatch.by_type |= {
            Topology: self._follow,
            Stop: lambda _: self.abandon("The engine is stopping."),
            Drain: lambda _: None,  # the program decides whether to send more requests
        }
        self.requests, self.queries = self._dispatch.requests, self._dispatch.queries
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_account_s = 0.0
        self._failure: str | None = None
        self._is_shutting_down = False
        self._is_stopped = False
        self._owner = os.getpid()
        try:
            self._supervisor = SupervisorProcess(self.config)
            try:
                self._supervisor.wait_until_ready()
            except BaseException:
                self._supervisor.stop()
                self._supervisor.close()
                raise
        except BaseException:
            self._close()
            raise

    @property
    def is_ours(self) -> bool:
        """True if this process started the engine, rather than being forked from it."""
        return os.getpid() == self._owner

    def check(self) -> None:
        """Raise `EngineError` if the processes have stopped."""
        if not self.is_ours:
            raise EngineError("this engine belongs to the parent process; create another one after fork")
        if self._is_shutting_down or self._is_stopped:
            raise EngineError(WAS_SHUT_DOWN)
        if self._failure is None and self._supervisor.process.poll() is not None:
            self._failure = f"the supervisor exited with status {self._supervisor.process.returncode}"
        if self._failure is not None:
            raise EngineError(f"the engine processes have stopped: {self._failure}; see the log above")

    def submit(
        self, read: ReadPrompt, params: SamplingParams | None, priority: int, mailbox: Mailbox | None = None
    ) -> Stream:
        """Submit a request; without parameters the model's defaults apply. Call from the attached loop. Raises `RequestError`."""
        chosen = params if params is not None else default_params(self.config.model.generation_defaults)
        return self.submit_read(read, read_params(chosen), read_priority(priority), mailbox, params is None)

    def submit_read(
        self,
        read: ReadPrompt,
        params: SamplingParams,
        priority: int,
        mailbox: Mailbox | None,
        clamp_max_tokens: bool,
    ) -> Stream:
        """Submit a request with parameters of valid types. Call from the attached loop. Raises `RequestError`."""
        spec = RequestSpec(
            self.requests.checked(params),
            priority=priority,
            cache_salt=read.cache_salt,
            adapter=read.adapter,
            return_prompt_ids=True,
        )
        interval = None if params.output_kind is OutputKind.FINAL_ONLY else 1
        return self.requests.submit(
            read.prompt, spec, mailbox=mailbox, interval=interval, clamp_max_tokens=clamp_max_tokens
        )

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive messages on this loop. Call from it; an earlier loop must be closed or idle."""
        if self._loop is loop:
            return
        self.detach()
        self._loop = loop
        loop.add_reader(self._inbox.fileno(), self._receive)
        loop.add_reader(self._supervisor.exit_fd, self._supervisor_ended)
        self._poll()

    def detach(self) -> None:
        """Stop receiving messages. Call from the attached loop, or after it is closed."""
        loop, self._loop = self._loop, None
        if self._timer is not None:
            self._timer.cancel()
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._inbox.fileno())
            loop.remove_reader(self._supervisor.exit_fd)

    def stop(self) -> None:
        """Stop the processes; running requests get no further outputs.

        Detaches, and closes the sockets. If another thread runs the attached loop, the loop does that later. Does nothing in a
        forked process, because sockets and processes belong to its parent.
        """
        if self._is_stopped or not self.is_ours:
            return
        self._is_stopped = True
        self._supervisor.stop()
        loop = self._loop
        if loop is not None and loop.is_running() and loop is not asyncio._get_running_loop():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(self._release)
                return
        self._release()

    def fail_for_shutdown(self) -> None:
        """Reject new requests, and fail the running ones. Call from the attached loop."""
        self._is_shutting_down = True
        self.abandon("The engine was shut down.")

    def abandon(self, reason: str) -> None:
        """Fail all running requests. Call from the attached loop."""
        self.requests.fail_all(RequestError(ErrorCode.UNAVAILABLE, reason))

    def _poll(self) -> None:
        """Poll the inbox, in case a frame raced the edge-triggered descriptor; report running requests."""
        assert self._loop is not None
        self._timer = self._loop.call_later(_POLL_S, self._poll)
        self._receive()
        if (now_s := time.monotonic()) >= self._next_account_s:
            self._next_account_s = now_s + REPORT_INTERVAL_S
            self._dispatch.send_reports()

    def _receive(self) -> None:
        for message in self._inbox.drain():
            self._dispatch.handle(message)

    def _follow(self, topology: Topology) -> None:
        self._peers.follow(topology.slots)
        self._dispatch.follow(topology)

    def _supervisor_ended(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._supervisor.exit_fd)
        self._failure = f"the supervisor exited with status {self._supervisor.process.wait()}"
        self.abandon(f"The engine processes have stopped: {self._failure}.")

    def _release(self) -> None:
        self.detach()
        self._supervisor.close()
        self._close()

    def _close(self) -> None:
        self._inbox.close()
        self._peers.close()
        self._bus.close()
        shutil.rmtree(self.config.run_dir, ignore_errors=True)
