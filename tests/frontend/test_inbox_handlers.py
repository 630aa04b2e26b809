"""Handlers of the messages in a frontend's inbox."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from quintet.frontend.inbox_handlers import InboxHandlers
from quintet.wire.dropped import Dropped
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import Cancel, FinishReason, Submit, TextPrompt, TokenizeQuery
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.supervision import ProcessSlot, SlotState, Topology
from tests.frontend.configs import make_config

PROMPT = TextPrompt("hello")


class World:
    """Dispatcher that knows one worker of each role, and its sent messages."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self.dispatch = InboxHandlers(WorkerId(Role.FRONTEND, 0, 1), self.send, make_config())
        self.publish(1, 1)

    def send(self, role: Role, index: int, message: msgspec.Struct) -> bool:
        self.sent.append(msgspec.structs.replace(message))
        return True

    def publish(self, version: int, epoch: int) -> None:
        slots = [
            ProcessSlot(WorkerId(role, 0, epoch), "", 1, SlotState.READY)
            for role in Role
            if role is not Role.SUPERVISOR
        ]
        self.dispatch.handle(Topology(version, slots))

    def of(self, kind: type[msgspec.Struct]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_requests_and_queries_to_a_lost_worker_are_resent() -> None:
    async def scenario() -> None:
        world = World()
        world.dispatch.requests.submit(PROMPT, RequestSpec(SamplingParams()))
        query = asyncio.ensure_future(world.dispatch.queries.tokenize(PROMPT))
        await asyncio.sleep(0)
        world.publish(2, 2)
        assert len(world.of(Submit)) == len(world.of(TokenizeQuery)) == 2
        query.cancel()

    run(scenario())


def test_oversized_message_is_rejected_at_once() -> None:
    """ZeroMQ would drop it, and no answer would arrive."""

    async def scenario() -> None:
        world = World()

        def send(role: Role, index: int, message: msgspec.Struct) -> bool:
            raise FrameTooLarge(900, role, 100)

        for part in (world.dispatch.requests._dispatcher, world.dispatch.queries):
            part._send = send  # type: ignore[attr-defined]
        for query_worker in (
            lambda: world.dispatch.requests.submit(PROMPT, RequestSpec(SamplingParams())).next_batch(),
            lambda: world.dispatch.queries.tokenize(PROMPT),
        ):
            with pytest.raises(RequestError, match=r"takes 900 bytes .* the limit is 100") as caught:
                await query_worker()
            assert caught.value.code is ErrorCode.TOO_LARGE
        assert world.dispatch.requests.num_live == 0 and not world.dispatch.queries._waiting

    run(scenario())


def test_oversized_pending_query_is_rejected() -> None:
    async def scenario() -> None:
        world = World()
        query = asyncio.ensure_future(world.dispatch.queries.tokenize(PROMPT))
        await asyncio.sleep(0)

        def send(role: Role, index: int, message: msgspec.Struct) -> bool:
            raise FrameTooLarge(900, role, 100)

        world.dispatch.queries._send = send
        world.publish(2, 2)
        with pytest.raises(RequestError, match=r"takes 900 bytes .* the limit is 100"):
            await query

    run(scenario())


def test_dropped_message_ends_its_requests_and_queries() -> None:
    """Its text is missing from now on and is not sent again."""

    async def scenario() -> None:
        world = World()
        requests = world.dispatch.requests
        streams = [requests.submit(PROMPT, RequestSpec(SamplingParams(n=2))) for _ in range(3)]
        streams[1].cancel()
        query = asyncio.ensure_future(world.dispatch.queries.tokenize(PROMPT))
        await asyncio.sleep(0)
        ids = [stream.request_id + 1 for stream in streams[:2]]
        world.dispatch.handle(Dropped("text_out", [*ids, 77]))
        world.dispatch.handle(Dropped("tokenized", query_id=world.of(TokenizeQuery)[0].query_id))
        world.dispatch.handle(Dropped("tokenized", query_id=77))
        with pytest.raises(RequestError, match="bug of the server") as caught:
            await streams[0].next_batch()
        assert caught.value.code is ErrorCode.INTERNAL
        batch = await streams[1].next_batch()
        assert batch is not None
        reasons = [delta.finish.reason for delta in batch.deltas if delta.finish is not None]
        assert reasons == [FinishReason.ABORT] * 2, "canceled as requested"
        with pytest.raises(RequestError, match=r"a message \(tokenized\)"):
            await query
        first = streams[0].request_id
        assert [cancel.request_ids for cancel in world.of(Cancel)][-1] == [first, first + 1]
        assert requests.num_live == 1

    run(scenario())
