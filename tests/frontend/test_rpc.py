"""RPC to other processes: matched answers, errors, timeouts."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quintet.frontend.load_balancing.load_ledger import LoadLedger
from quintet.frontend.load_balancing.workers import Workers
from quintet.frontend.rpc import Rpc
from quintet.process.work_journal import WorkId
from quintet.wire.codec import pack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Detokenized, Failed, TextPrompt, Tokenized
from quintet.wire.supervision import ProcessSlot, SlotState, Topology
from tests.frontend.configs import leave_work, make_config

ME = WorkerId(Role.FRONTEND, 0, 1)


class World:
    def __init__(self, timeout_s: float = 10.0, run_dir: str = "/nowhere") -> None:
        self.sent: list[tuple[Role, int, Any]] = []
        self.ledger = LoadLedger(Workers(ME, run_dir), make_config())
        self.workers = self.ledger.workers
        self.workers.follow(
            Topology(1, [ProcessSlot(WorkerId(Role.TOKENIZER, i, 1), "", 1, SlotState.READY) for i in (0, 1)])
        )
        self.queries = Rpc(ME, self.send, self.ledger, timeout_s)

    def send(self, role: Role, index: int, message: msgspec.Struct) -> bool:
        self.sent.append((role, index, message))
        return True


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_answers_match_queries_in_any_order() -> None:
    async def scenario() -> None:
        world = World()
        tasks = [asyncio.ensure_future(world.queries.tokenize(TextPrompt(t))) for t in ("a", "b")]
        await asyncio.sleep(0)
        (_, first, a), (_, second, b) = world.sent
        assert {first, second} == {0, 1}
        world.queries.handle(Tokenized(b.query_id, pack_i32([2])))
        world.queries.handle(Tokenized(a.query_id, pack_i32([1])))
        world.queries.handle(Tokenized(a.query_id, pack_i32([9])))
        world.queries.handle(Detokenized(77, "no query"))
        answers = [await task for task in tasks]
        assert [answer.token_ids for answer in answers] == [pack_i32([1]), pack_i32([2])]
        assert [world.ledger.at(Role.TOKENIZER, i) for i in (0, 1)] == [0, 0]

    run(scenario())


def test_error_is_raised_as_sent() -> None:
    async def scenario() -> None:
        world = World()
        query = asyncio.ensure_future(world.queries.tokenize(TextPrompt("")))
        await asyncio.sleep(0)
        error = Failed(0, ErrorCode.INVALID, "the prompt is empty", "prompt")
        world.queries.handle(Tokenized(world.sent[0][2].query_id, b"", None, error))
        with pytest.raises(RequestError, match="the prompt is empty") as caught:
            await query
        assert caught.value.param == "prompt"

    run(scenario())


def test_timeout_names_the_process() -> None:
    """The query carries its deadline, so that a late answer is not computed."""

    async def scenario() -> None:
        world = World(timeout_s=0.01)
        start_ns = time.monotonic_ns()
        with pytest.raises(RequestError, match=r"tokenizer.*within 0.01 s") as caught:
            await world.queries.tokenize(TextPrompt("a"))
        assert caught.value.code is ErrorCode.TIMEOUT
        assert start_ns + 10_000_000 <= world.sent[0][2].until_ns <= time.monotonic_ns()
        world.queries.handle(Tokenized(world.sent[0][2].query_id, b""))
        assert world.ledger.at(Role.TOKENIZER, 0) == 0

    run(scenario())


def test_large_prompt_has_a_longer_timeout() -> None:
    async def scenario() -> None:
        world = World(timeout_s=0.01)
        huge = asyncio.ensure_future(world.queries.tokenize(TextPrompt("a " * (4 << 20))))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="did not answer"):
            await world.queries.tokenize(TextPrompt("a"))
        world.queries.handle(Tokenized(world.sent[0][2].query_id, pack_i32([1])))
        assert (await huge).token_ids == pack_i32([1])

    run(scenario())


def test_query_without_a_worker() -> None:
    async def scenario() -> None:
        world = World()
        with pytest.raises(RequestError, match="No detokenizer") as caught:
            await world.queries.detokenize([1])
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert world.sent == []

    run(scenario())


def test_query_that_ends_tokenizers_fails(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(run_dir=str(tmp_path))
        query = asyncio.ensure_future(world.queries.tokenize(TextPrompt("a")))
        await asyncio.sleep(0)
        for epoch in range(2, 5):
            for index in (0, 1):
                query_id = world.sent[0][2].query_id
                leave_work(
                    tmp_path, WorkerId(Role.TOKENIZER, index, epoch - 1), WorkId(1 + ME.index, query_id)
                )
            slots = [ProcessSlot(WorkerId(Role.TOKENIZER, i, epoch), "", 1, SlotState.READY) for i in (0, 1)]
            world.workers.follow(Topology(epoch, slots))
            world.queries.follow()
            world.queries.follow()
        with pytest.raises(RequestError, match="died 3 times in a row"):
            await query
        assert len(world.sent) == 3
        assert [world.ledger.at(Role.TOKENIZER, i) for i in (0, 1)] == [0, 0]

    run(scenario())


def test_query_to_a_lost_process_is_resent() -> None:
    async def scenario() -> None:
        world = World()
        query = asyncio.ensure_future(world.queries.tokenize(TextPrompt("a")))
        await asyncio.sleep(0)
        [(_, index, first)] = world.sent
        world.workers.follow(Topology(2, []))
        world.queries.follow()
        assert len(world.sent) == 1  # no worker is ready
        world.workers.follow(
            Topology(3, [ProcessSlot(WorkerId(Role.TOKENIZER, index, 2), "", 1, SlotState.READY)])
        )
        world.queries.follow()
        world.queries.follow()
        assert [message.query_id for _, _, message in world.sent] == [first.query_id] * 2
        world.queries.handle(Tokenized(first.query_id, pack_i32([1])))
        assert (await query).token_ids == pack_i32([1])
        assert world.ledger.at(Role.TOKENIZER, index) == 0

    run(scenario())
