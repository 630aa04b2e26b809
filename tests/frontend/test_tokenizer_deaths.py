"""Requests that end tokenizers are rejected; the others are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.process.work_journal import REQUEST, WorkId
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import FinishReason, Submit
from quintet.wire.supervision import SlotState
from tests.frontend.configs import leave_work
from tests.frontend.test_live_requests import PROMPT, World, rest, run, spec_of


def test_request_that_ends_tokenizers_is_rejected_and_the_others_are_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(str(tmp_path)).follow()
        poison, other, interrupted = (world.requests.submit(PROMPT, spec_of()) for _ in range(3))
        for epoch in range(1, 4):
            assert not poison.ended
            encoded = [poison] if epoch == 2 else [poison, interrupted]
            work = [WorkId(REQUEST, stream.request_id) for stream in encoded]
            leave_work(tmp_path, WorkerId(Role.TOKENIZER, 0, epoch), *work)
            world.slots[Role.TOKENIZER, 0] = (epoch + 1, SlotState.READY)
            world.follow()
        with pytest.raises(RequestError, match="died 3 times in a row") as caught:
            await rest(poison)
        assert caught.value.code is ErrorCode.UNPROCESSABLE
        sent = [submit.request_id for submit in world.of(Submit)]
        expected = {poison.request_id: 3, other.request_id: 4, interrupted.request_id: 4}
        assert {each: sent.count(each) for each in sent} == expected
        for stream in (other, interrupted):
            world.text([], finished=[(stream.request_id, FinishReason.STOP)])
        assert world.requests.num_live == 0
        assert world.requests.ledger.at(Role.TOKENIZER, 0) == 0

    run(scenario())


def test_requests_survive_any_number_of_killed_tokenizers(tmp_path: Path) -> None:
    """A killed tokenizer was encoding at most a few of its requests."""

    async def scenario() -> None:
        world = World(str(tmp_path)).follow()
        streams = [world.requests.submit(PROMPT, spec_of()) for _ in range(20)]
        for epoch in range(1, 20):
            work = [WorkId(REQUEST, stream.request_id) for stream in streams[epoch % 3 :: 3]]
            leave_work(tmp_path, WorkerId(Role.TOKENIZER, 0, epoch), *work)
            world.slots[Role.TOKENIZER, 0] = (epoch + 1, SlotState.READY)
            world.follow()
        assert world.requests.num_live == 20

    run(scenario())
