"""Reconciliation of live requests between the frontend and other processes."""

from __future__ import annotations

import pytest

from quintet.frontend.reconcile import MAX_TIMES_UNKNOWN
from quintet.wire.codec import pack_i64, unpack_i32, unpack_i64
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role
from quintet.wire.messages import Cancel, FinishReason, InFlightReport, Live, Submit, Unknown
from quintet.wire.supervision import SlotState

from .test_live_requests import PROMPT, World, run, spec_of


def test_unknown_request_is_resent() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(n=2))
        world.requests.resume_unknown(Unknown(pack_i64([stream.request_id, stream.request_id + 1, 77])))
        first, second = world.of(Submit)
        assert (second.request_id, second.spec.attempt, second.spec.params.n) == (first.request_id, 1, 2)

    run(scenario())


def test_repeatedly_lost_request_ends_with_an_error() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of())
        for _ in range(MAX_TIMES_UNKNOWN):
            world.requests.resume_unknown(Unknown(pack_i64([stream.request_id])))
        assert len(world.of(Submit)) == 1 + MAX_TIMES_UNKNOWN
        world.requests.resume_unknown(Unknown(pack_i64([stream.request_id])))
        with pytest.raises(RequestError, match="was lost inside the server 4 times") as caught:
            await stream.next_batch()
        assert caught.value.code is ErrorCode.INTERNAL
        assert len(world.of(Submit)) == 1 + MAX_TIMES_UNKNOWN and len(world.of(Cancel)) == 1
        assert world.requests.num_live == 0

    run(scenario())


def test_repeatedly_lost_choice_ends_the_request() -> None:
    async def scenario() -> None:
        world = World().follow()
        stream = world.requests.submit(PROMPT, spec_of(n=2))
        first, second = stream.request_id, stream.request_id + 1
        world.text([], started=[first], finished=[(first, FinishReason.STOP)])
        for _ in range(MAX_TIMES_UNKNOWN + 1):
            world.requests.resume_unknown(Unknown(pack_i64([second])))
        assert stream.ended and world.requests.num_live == 0
        with pytest.raises(RequestError, match="was lost inside the server"):
            [batch async for batch in stream]

    run(scenario())


def test_reports_name_live_requests_and_their_route() -> None:
    async def scenario() -> None:
        world = World()
        world.slots[Role.TOKENIZER, 1] = (1, SlotState.READY)
        world.follow()
        first, second = (world.requests.submit(PROMPT, spec_of(n=2)) for _ in range(2))
        started = first.request_id
        world.text([(started, "a", 0, 0, [1])], started=[started])
        world.text([], finished=[(started + 1, FinishReason.STOP)])
        world.requests.resume_unknown(Unknown(pack_i64([second.request_id])))
        world.unreachable = True
        world.requests.submit(PROMPT, spec_of())  # no worker has it yet
        accounts = {(role, index): account for role, index, account in world.requests.in_flight_reports()}
        live = accounts.pop((Role.CORE, 0))
        assert isinstance(live, Live)
        parked = second.request_id + 2
        assert list(unpack_i64(live.request_ids)) == [
            started,
            second.request_id,
            second.request_id + 1,
            parked,
        ]
        named = {}
        for (role, index), account in accounts.items():
            assert (
                isinstance(account, InFlightReport) and role is Role.TOKENIZER and account.tokenizer == index
            )
            ids, attempts = unpack_i64(account.request_ids), unpack_i32(account.attempts)
            named |= {request_id: (index, n) for request_id, n in zip(ids, attempts, strict=True)}
        assert named == {
            started: (first.tokenizer, 0),
            second.request_id: (second.tokenizer, 1),
            second.request_id + 1: (second.tokenizer, 1),
        }

    run(scenario())
