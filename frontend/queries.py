"""Small questions to other processes, as awaitables with a timeout."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from quintet.frontend.router import Seats
from quintet.frontend.sessions import Send
from quintet.wire.codec import pack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import (
    ChatPrompt,
    Detokenized,
    DetokenizeQuery,
    MetricsQuery,
    MetricsReport,
    Reclaim,
    Reclaimed,
    TextPrompt,
    Tokenized,
    TokenizeQuery,
)

Answer = Tokenized | Detokenized | MetricsReport | Reclaimed
AnswerT = TypeVar("AnswerT", Tokenized, Detokenized, MetricsReport, Reclaimed)


class Queries:
    """Asks, and matches answers to questions. Feed it every answer that arrives (`handle`)."""

    def __init__(self, me: WorkerId, send: Send, seats: Seats, timeout_s: float = 30.0) -> None:
        self._me = me
        self._send = send
        self._seats = seats
        self._timeout_s = timeout_s
        self._last_id = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def handle(self, answer: Answer) -> None:
        """Hand an answer to whoever asked; an answer that comes too late is dropped."""
        waiter = self._waiting.get(answer.query_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, token_strs: bool = False) -> Tokenized:
        """Encode a prompt. Raises `RequestError`."""
        query = TokenizeQuery(self._take_id(), self._me.index, prompt, token_strs)
        answer = await self._ask(Role.TOKENIZER, query, query.query_id, Tokenized, self._timeout_s)
        if answer.error is not None:
            raise RequestError(answer.error.code, answer.error.message, answer.error.param)
        return answer

    async def detokenize(self, token_ids: list[int]) -> str:
        """Decode token ids, special tokens included. Raises `RequestError`."""
        query = DetokenizeQuery(self._take_id(), self._me.index, pack_i32(token_ids))
        answer = await self._ask(Role.DETOKENIZER, query, query.query_id, Detokenized, self._timeout_s)
        if answer.error is not None:
            raise RequestError(answer.error.code, answer.error.message, answer.error.param)
        return answer.text

    async def reclaim(self, request_id: int, key: bytes) -> Reclaimed:
        """Ask for a request that its client wants to go on reading. Raises `RequestError` when no core answers."""
        query = Reclaim(self._take_id(), self._me.index, request_id, key)
        return await self._ask(Role.CORE, query, query.query_id, Reclaimed, self._timeout_s)

    async def metrics(self, timeout_s: float = 1.0) -> MetricsReport:
        """Ask the supervisor for everybody's figures. Raises `RequestError` when it does not answer in time."""
        query = MetricsQuery(self._take_id(), self._me.index)
        return await self._ask(Role.SUPERVISOR, query, query.query_id, MetricsReport, timeout_s)

    def _take_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _ask(
        self, role: Role, query: msgspec.Struct, query_id: int, kind: type[AnswerT], timeout_s: float
    ) -> AnswerT:
        index = 0 if role is Role.SUPERVISOR else self._seats.pick(role)
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[query_id] = waiter
        if index is not None:
            self._seats.add_load(role, index, 1)
        try:
            if index is None or not self._send(role, index, query):
                raise RequestError(ErrorCode.UNAVAILABLE, f"No {role} process is running; try again shortly.")
            async with asyncio.timeout(timeout_s):
                answer = await waiter
        except TimeoutError:
            raise RequestError(
                ErrorCode.TIMEOUT, f"The {role} process did not answer within {timeout_s:g} s; try again."
            ) from None
        finally:
            del self._waiting[query_id]
            if index is not None:
                self._seats.add_load(role, index, -1)
        assert isinstance(answer, kind), f"query {query_id} to {role} was answered by {type(answer).__name__}"
        return answer
