"""Deadline timer, and the cleanup of expired requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from quintet.frontend.deadlines import DeadlineTimer
from quintet.frontend.live_requests import LiveRequests
from quintet.frontend.streams import Mailbox, Stream
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Cancel, Finish, FinishReason, Submit, Text, TextPrompt
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from tests.frontend.configs import make_config
from tests.frontend.test_live_requests import PROMPT, World, rest, run, spec_of


class Clock:
    """Fake clock, and an event loop's timers on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.timers: list[asyncio.TimerHandle] = []
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)

    def __call__(self) -> int:
        return self.now_ns

    def call_later(self, wait_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.new_event_loop()
        timer = asyncio.TimerHandle(self.now_ns * 1e-9 + wait_s, callback, (), loop)
        loop.close()
        self.timers.append(timer)
        return timer

    def advance(self, to_ns: int) -> None:
        """Advance the time, timer by timer."""
        while due_timers := [
            t for t in self.timers if not t.cancelled() and t.when() <= to_ns * 1e-9 + 1e-12
        ]:
            timer = min(due_timers, key=lambda t: t.when())
            self.timers.remove(timer)
            self.now_ns = max(self.now_ns, round(timer.when() * 1e9))
            timer._run()
        self.now_ns = to_ns


def request(deadline_ns: int) -> Stream:
    submit = Submit(
        deadline_ns, TextPrompt("x"), RequestSpec(SamplingParams(), 0, 0, deadline_ns=deadline_ns), 0, 0
    )
    return Stream(submit, Mailbox(), lambda _: None)


def test_deadlines_expire_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    expired: list[tuple[int, int]] = []
    deadlines = DeadlineTimer(lambda stream: expired.append((stream.request_id, clock.now_ns)), clock)
    for deadline_ns in (300, 100, 200, 100):
        deadlines.watch(request(deadline_ns))
    clock.advance(99)
    assert expired == []
    clock.advance(1000)
    assert expired == [(100, 100), (100, 100), (200, 200), (300, 300)]
    assert not [timer for timer in clock.timers if not timer.cancelled()]


def test_one_timer_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    deadlines = DeadlineTimer(lambda _: None, clock)
    for deadline_ns in range(1000, 0, -1):
        deadlines.watch(request(deadline_ns))
    assert len([timer for timer in clock.timers if not timer.cancelled()]) == 1


def test_finished_request_is_removed_without_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    expired: list[Stream] = []
    deadlines = DeadlineTimer(expired.append, clock)
    for deadline_ns in range(1, 10_000):
        stream = request(deadline_ns + 1_000_000)
        deadlines.watch(stream)
        stream.num_open = 0
    assert len(deadlines._heap.entries) < 1000
    clock.advance(2_000_000)
    assert expired == []


def expired_world(deadline_ns: int) -> tuple[World, Stream]:
    world = World().follow()
    return world, world.requests.submit(PROMPT, spec_of(arrival_ns=1, deadline_ns=deadline_ns))


def test_an_expired_request_is_cancelled_and_fails_once() -> None:
    async def scenario() -> None:
        world, stream = expired_world(1)
        with pytest.raises(RequestError) as caught:
            await rest(stream)
        assert caught.value.code is ErrorCode.DEADLINE
        assert world.of(Cancel)[0].request_ids == [stream.request_id]
        assert world.requests.num_live == 0
        world.text(
            [], finished=[(stream.request_id, FinishReason.ABORT)]
        )  # the engine's answer to the cancel
        assert await stream.next_batch() is None

    run(scenario())


def test_cancelled_request_ends_as_aborted_after_its_deadline() -> None:
    async def scenario() -> None:
        world, stream = expired_world(1)
        stream.cancel()
        (batch,) = await rest(stream)
        assert [delta.finish and delta.finish.reason for delta in batch.deltas] == [FinishReason.ABORT]
        assert world.requests.num_live == 0 and len(world.of(Cancel)) == 1

    run(scenario())


def test_request_without_a_worker_expires() -> None:
    async def scenario() -> None:
        requests = LiveRequests(WorkerId(Role.FRONTEND, 0, 1), lambda *_: False, make_config())
        stream = requests.submit(PROMPT, spec_of(arrival_ns=1, deadline_ns=1))
        with pytest.raises(RequestError) as caught:
            await rest(stream)
        assert caught.value.code is ErrorCode.DEADLINE
        assert requests.num_live == 0

    run(scenario())


def test_expiry_in_the_core_gives_the_same_error() -> None:
    async def scenario() -> None:
        deadline_ns = time.monotonic_ns() + 10_000_000
        world, stream = expired_world(deadline_ns)
        world.text([(stream.request_id, "hi", 0, 0, [5])], started=[stream.request_id])
        while time.monotonic_ns() < deadline_ns:
            pass  # the timer cannot fire: the event loop does not run
        world.text([], finished=[(stream.request_id, FinishReason.ABORT)])
        batches = await collect(stream)
        assert batches[0] == "hi"
        assert isinstance(batches[1], RequestError) and batches[1].code is ErrorCode.DEADLINE
        assert "output tokens so far: 1" in batches[1].message
        assert not world.of(Cancel)

    run(scenario())


def test_request_resumed_by_another_connection_does_not_expire() -> None:
    async def scenario() -> None:
        world, stream = expired_world(1 << 62)
        world.text([], finished=[(stream.request_id, FinishReason.ABORT)])
        (batch,) = await rest(stream)
        assert batch.deltas[0].finish is not None and batch.deltas[0].finish.reason is FinishReason.ABORT

    run(scenario())


async def collect(stream: Stream) -> list[object]:
    """Return the text of every batch and the final error."""
    seen: list[object] = []
    try:
        async for batch in stream:
            seen.append("".join(delta.text for delta in batch.deltas))
    except RequestError as error:
        seen.append(error)
    return seen


def test_a_cancelled_request_ends_as_cancelled() -> None:
    async def scenario() -> None:
        world, stream = expired_world(1 << 62)
        stream.cancel()
        world.requests.apply_text(
            Text(
                1, 0, 0, [], [], [], [], [], [], b"", [Finish(stream.request_id, FinishReason.ABORT, None, 0)]
            )
        )
        (batch,) = await rest(stream)
        assert batch.deltas[0].finish is not None and batch.deltas[0].finish.reason is FinishReason.ABORT

    run(scenario())
