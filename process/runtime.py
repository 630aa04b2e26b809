"""Runtime of child processes: messages, heartbeats, topology and metrics. `quintet.process.child` starts one.

Two loops use it: the blocking loop of core, executor and detokenizer (`Process.receive`), and the asyncio loop of
frontend and tokenizer (`Process.attach`).
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from quintet.process.os_tuning import set_batch_scheduling, trim_memory
from quintet.process.record import Recorder
from quintet.process.sockets import MessageT, Peers, Rejection, address_of
from quintet.process.spans import TraceSpan, no_span
from quintet.process.trace import Tracer
from quintet.process.wires import Wires, open_wires
from quintet.wire.codec import encode
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.ids import Role, WorkerId
from quintet.wire.limits import largest_frames
from quintet.wire.metrics import Metrics
from quintet.wire.supervision import Drain, Heartbeat, MetricsReport, Ready, ReportMetrics, Stop, Topology

if TYPE_CHECKING:
    import asyncio  # the blocking loops start without it

SUPERVISOR = WorkerId(Role.SUPERVISOR, 0, 1)
COMMON_MESSAGES = (Topology, ReportMetrics, Dropped, Stop)
"""Messages that every process handles."""
METRICS_S = 1.0
"""Minimum interval of metrics in heartbeats: an idle server should use almost no CPU."""


class Stopping(BaseException):
    """The supervisor asked this process to exit; unwinds the loop."""


class HandlerError(Exception):
    """The cause is an error of this process's message loop, which ends the process; other callbacks raise their own errors."""


class Process(Generic[MessageT]):
    """One child's slot: identity, inbox, peers, metrics, heartbeat.

    Heartbeats carry the worker's ``pending`` and ``progress``; a worker may replace ``account`` to compute them on
    demand. ``now_ns`` is the time at which the current batch of messages was received. Decisions use it, so that the
    same batches lead to the same decisions; durations are measured with `time.monotonic_ns`.
    """

    def __init__(self, me: WorkerId, config: EngineConfig, accepts: Any, wires: Wires | None = None) -> None:
        """Replays pass ``wires`` instead of the sockets in the run folder."""
        self.me = me
        self.config = config
        self.metrics = Metrics()
        self.log = logging.getLogger("quintet")
        self.topology = Topology(0, [])
        self.replaced: list[WorkerId] = []
        self.progress = 0
        self.pending = 0
        self.account: Callable[[], tuple[int, int]] = lambda: (self.progress, self.pending)
        """Returns progress and pending for a heartbeat; see `Heartbeat`. Called before metrics are sent."""
        self._recorder = Recorder(me, config) if config.record is not None and wires is None else None
        self._wires = wires or open_wires(
            me, config, accepts | Topology | Drain | Stop | MetricsReport | ReportMetrics, self._recorder
        )
        self.inbox = self._wires.inbox
        recorded = None if self._recorder is None else self._recorder.sent
        self.peers = Peers(self._wires.bus, largest_frames(config), recorded)
        self.now_ns = 0  # until the first batch: a replay has no earlier time
        self._rejected = {
            why: self.metrics.counter("rejected_frames", "Frames dropped by an inbox.", reason=why.value)
            for why in Rejection
        }
        self._last_dropped: Dropped | None = None
        """Since the last log entry about dropped frames."""
        self.peers.connect(SUPERVISOR, address_of(config.run_dir, SUPERVISOR))
        self._beat_s = config.processes.heartbeat_s
        self._next_beat = time.monotonic() + self._beat_s
        self._last_metrics = b""
        self._next_metrics = 0.0
        self._heartbeat_thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._tracer = None if config.trace is None else Tracer(me, config.trace)
        self.span: TraceSpan = no_span if self._tracer is None else self._tracer.span
        """Records a trace span; does nothing unless tracing is enabled."""
        if self._tracer is not None:
            self._tracer.write_on_signal()

    def ready(self, **facts: str) -> None:
        """Report to the supervisor that this process is ready. Excludes objects allocated at start from garbage collection."""
        gc.collect()
        gc.freeze()
        trim_memory()
        self.peers.send(Role.SUPERVISOR, 0, Ready(self.me, os.getpid(), facts))
        self.beat()

    def beat(self) -> None:
        self._next_beat = time.monotonic() + self._beat_s
        self._beat(self.peers, with_metrics=self._heartbeat_thread is None)

    def send_metrics(self) -> None:
        """Send a heartbeat with current metrics to the supervisor."""
        self._next_metrics = 0.0
        self._beat(self.peers, with_metrics=True)

    def _beat(self, peers: Peers, *, with_metrics: bool) -> None:
        changed, now = b"", time.monotonic()
        progress, pending = self.account()
        if with_metrics and now >= self._next_metrics:
            self._next_metrics = now + METRICS_S
            metrics = self._encoded_metrics()
            changed = metrics if metrics != self._last_metrics else b""
            self._last_metrics = metrics
        self._send_heartbeat(peers, progress, pending, changed)

    def _send_heartbeat(self, peers: Peers, progress: int, pending: int, metrics: bytes) -> None:
        cpu_ns, version = time.process_time_ns(), self.topology.version
        peers.send(Role.SUPERVISOR, 0, Heartbeat(self.me, progress, pending, cpu_ns, metrics, version))

    def start_heartbeat_thread(self) -> None:
        """Start a heartbeat thread, for loops that may compute for seconds between messages.

        It calls ``account``, which must report the progress of the computation.
        """
        self._heartbeat_thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self._heartbeat_thread.start()

    def _keep_beating(self) -> None:
        set_batch_scheduling()
        peers = Peers(self._wires.bus, largest_frames(self.config))  # a socket belongs to one thread
        peers.connect(SUPERVISOR, address_of(self.config.run_dir, SUPERVISOR))
        while not self._closing.wait(self._beat_s):
            self._beat(peers, with_metrics=True)
        peers.close()

    def receive(self, timeout_s: float | None = None) -> list[Any]:
        """Return the messages that arrived, waiting up to ``timeout_s`` (None: until one arrives or a heartbeat is due).

        Topology changes are applied to ``peers`` first and then returned like any message, with the workers that took
        over a slot in ``replaced``. Raises `Stopping` when the supervisor asked the process to exit.
        """
        now = time.monotonic()
        if now >= self._next_beat:
            if self._heartbeat_thread is None:
                self.beat()
            else:
                self._next_beat = now + self._beat_s
        until_beat = max(0.001, self._next_beat - now)
        messages = self.inbox.wait(until_beat if timeout_s is None else min(timeout_s, until_beat))
        self._begin_turn()
        for message in messages:
            if isinstance(message, COMMON_MESSAGES):
                self._handle_common(message)
        return messages

    def attach(self, loop: asyncio.AbstractEventLoop, handle: Callable[[Any], None]) -> None:
        """Call ``handle`` for every message, in order, from ``loop``, and send heartbeats from it.

        An error of either reaches the exception handler of ``loop`` as `HandlerError`.
        """

        def on_readable() -> None:
            messages = self.inbox.drain()
            if messages:
                self._begin_turn()
            for message in messages:
                if isinstance(message, COMMON_MESSAGES):
                    self._handle_common(message)
                if not isinstance(message, ReportMetrics):
                    handle(message)

        def on_beat() -> None:
            self.beat()
            if self._recorder is not None:
                self._recorder.flush()
            on_readable()  # a frame that raced the descriptor's edge waits at most until now
            loop.call_later(self._beat_s, call, on_beat)

        def call(callback: Callable[[], None]) -> None:
            try:
                callback()
            except Exception as error:
                raise HandlerError(f"{type(error).__name__}: {error}") from error

        loop.add_reader(self.inbox.fileno(), call, on_readable)
        loop.call_later(self._beat_s, call, on_beat)
        loop.call_soon(call, on_readable)

    def _begin_turn(self) -> None:
        self.now_ns = now_ns = self._wires.clock()
        if self._recorder is not None:
            self._recorder.begin_iteration(now_ns, was_idle=not self.pending)

    def _encoded_metrics(self) -> bytes:
        """Return the metrics for a heartbeat, with the frames that the inbox has dropped."""
        for why, series in self._rejected.items():
            num = self.inbox.rejected[why] - round(series.value)
            if num:
                series.inc(num)
                self.log.warning("dropped %d frames: %s", num, why.value)
        last, self._last_dropped = self._last_dropped, None
        if last is not None:
            self.log.error(
                "the last dropped frame is %s with requests %s%s, which end",
                last.kind, last.request_ids[:8], "" if last.step is None else f" in step {last.step}",
            )  # fmt: skip
        return self.metrics.encoded()

    def _handle_common(self, message: msgspec.Struct) -> None:
        if isinstance(message, Topology):
            if message.version > self.topology.version:
                self.topology = message
                if self._recorder is not None:
                    self._recorder.topology = encode(message)
                self.replaced = self.peers.follow(message.slots)
                self.beat()
        elif isinstance(message, ReportMetrics):
            self.send_metrics()
        elif isinstance(message, Dropped):
            self._last_dropped = message
        elif isinstance(message, Stop):
            raise Stopping

    def close(self) -> None:
        """Send the last metrics, write trace and recording if enabled, and close every socket."""
        self._closing.set()
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.join()
        # The supervisor keeps the counts since the last heartbeat.
        self._send_heartbeat(self.peers, self.progress, 0, self._encoded_metrics())
        if self._tracer is not None:
            self._tracer.try_to_write()
        self.inbox.close()
        self.peers.close()
        self._wires.close()
        if self._recorder is not None:
            self._recorder.close()
