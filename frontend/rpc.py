"""RPC to other processes: awaitable queries with a timeout, resent when the process is replaced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from quintet.frontend.load_balancing.dispatcher import Send, too_large
from quintet.frontend.load_balancing.load_ledger import LoadLedger, num_prompt_tokens
from quintet.frontend.reconcile import MAX_TOKENIZER_DEATHS, poison_error
from quintet.process.work_journal import WorkId
from quintet.wire.codec import pack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_admin import KvQuery, KvReport, Verb
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import (
    ChatPrompt,
    Detokenized,
    DetokenizeQuery,
    Open,
    Resume,
    Resumed,
    TextPrompt,
    Tokenized,
    TokenizeQuery,
)
from quintet.wire.supervision import MetricsQuery, MetricsReport

MIN_TOKENS_PER_S = 1 << 16
"""Lower bound of the tokenizer's speed, for the timeout of long prompts, with a few as long prompts queued before it."""

FILE_TIMEOUT_S = 600.0
"""Timeout of export and import: gigabytes, at the lowest I/O priority."""

Answer = Tokenized | Detokenized | MetricsReport | Resumed | KvReport
AnswerT = TypeVar("AnswerT", Tokenized, Detokenized, MetricsReport, Resumed, KvReport)


@dataclass(slots=True, eq=False)
class _PendingQuery:
    """Pending query."""

    role: Role
    message: msgspec.Struct
    answer: asyncio.Future[Answer]
    index: int | None = None
    """Worker that has the query; None while there is none."""
    slot: int | None = None
    """Required worker; None for any worker of the role."""
    epoch: int = 0
    num_tokenizer_deaths: int = 0
    """Deaths of tokenizers in a row, each while it encoded the query."""


class Rpc:
    """Sends queries and matches answers to them. Pass every answer that arrives to `handle`."""

    def __init__(self, me: WorkerId, send: Send, ledger: LoadLedger, timeout_s: float = 30.0) -> None:
        self._me = me
        self._send = send
        self._ledger, self._workers = ledger, ledger.workers
        self._timeout_s = timeout_s
        self._last_id = 0
        self._waiting: dict[int, _PendingQuery] = {}

    def handle(self, answer: Answer) -> None:
        """Resolve the query that an answer belongs to; drop a late answer."""
        pending = self._waiting.get(answer.query_id)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(answer)

    def fail(self, query_id: int, error: RequestError) -> None:
        pending = self._waiting.get(query_id)
        if pending is not None and not pending.answer.done():
            pending.answer.set_exception(error)

    def follow(self) -> None:
        """Send queries again that have no live worker; fail those that ended tokenizers. Call after `Workers.follow`."""
        for query_id, pending in list(self._waiting.items()):
            if pending.role is Role.SUPERVISOR or pending.answer.done():
                continue
            index = pending.index
            if index is None or self._workers.epoch(pending.role, index) != pending.epoch:
                query = WorkId(1 + self._me.index, query_id)
                was_encoded = query in self._workers.work_lost
                if index is not None:
                    pending.num_tokenizer_deaths = pending.num_tokenizer_deaths + 1 if was_encoded else 0
                self._withdraw(pending)
                if pending.num_tokenizer_deaths >= MAX_TOKENIZER_DEATHS:
                    logging.getLogger("quintet").warning("%s rejected: it ended tokenizers", query)
                    pending.answer.set_exception(poison_error())
                else:
                    self._send_query(pending)

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, token_strs: bool = False) -> Tokenized:
        """Encode a prompt. Raises `RequestError`."""
        timeout_s = self._timeout_s + num_prompt_tokens(prompt) // MIN_TOKENS_PER_S
        until_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        query = TokenizeQuery(self._take_id(), self._me.index, prompt, token_strs, until_ns)
        answer = await self._ask(Role.TOKENIZER, query, query.query_id, Tokenized, timeout_s)
        if answer.error is not None:
            raise RequestError(answer.error.code, answer.error.message, answer.error.param)
        return answer

    async def detokenize(self, token_ids: list[int]) -> str:
        """Decode token ids, special tokens included. Raises `RequestError`."""
        return (await self.read_output(token_ids)).text

    async def read_output(
        self, token_ids: Sequence[int], opened: Open | None = None, *, is_cut: bool = False
    ) -> Detokenized:
        """Decode a request's whole output and run its parsers on it; without ``opened`` only decode. Raises `RequestError`.

        ``is_cut``: a limit ended the output, not the model.
        """
        query = DetokenizeQuery(self._take_id(), self._me.index, pack_i32(token_ids), opened, is_cut)
        answer = await self._ask(Role.DETOKENIZER, query, query.query_id, Detokenized, self._timeout_s)
        if answer.error is not None:
            raise RequestError(answer.error.code, answer.error.message, answer.error.param)
        return answer

    async def resume(self, request_id: int, key: bytes, rename_to: int = 0) -> Resumed:
        """Ask all cores for a retained request; return the answer of the core that has it, else a negative one.

        Raises `RequestError` if no core has it and one does not answer.
        """
        version = self._workers.topology.version

        async def ask(core: int | None) -> Resumed:
            query = Resume(self._take_id(), self._me.index, request_id, key, version, rename_to)
            return await self._ask(Role.CORE, query, query.query_id, Resumed, self._timeout_s, core)

        cores: list[int | None] = [*self._workers.cores()]
        tasks = [asyncio.ensure_future(ask(core)) for core in cores or [None]]
        answer, failure = None, None
        try:
            for each in asyncio.as_completed(tasks):
                try:
                    answer = await each
                except RequestError as error:
                    failure = error
                    continue
                if answer.admit is not None:
                    return answer
        finally:
            for task in tasks:
                task.cancel()
        if answer is None or failure is not None:
            raise failure or RequestError(ErrorCode.UNAVAILABLE, "No core answered; try again shortly.")
        return answer

    async def metrics(self, timeout_s: float, own: bytes = b"") -> MetricsReport:
        """Read all processes' metrics from the supervisor; ``own``: this process's current metrics, encoded.

        Raises `RequestError` on timeout.
        """
        query = MetricsQuery(self._take_id(), self._me, own)
        return await self._ask(Role.SUPERVISOR, query, query.query_id, MetricsReport, timeout_s)

    async def kv_query(self, verb: Verb, **fields: Any) -> list[KvReport]:
        """Send a KV cache query to every core; ``fields``: fields of `KvQuery`. Raises `RequestError` unless all answer.

        An export stops at the first core that succeeds.
        """
        timeout_s = FILE_TIMEOUT_S if verb in ("export", "import") else self._timeout_s

        async def ask(core: int | None) -> KvReport:
            query = KvQuery(self._take_id(), self._me.index, verb, **fields)
            return await self._ask(Role.CORE, query, query.query_id, KvReport, timeout_s, core)

        cores: list[int | None] = [*self._workers.cores()] or [None]
        if verb != "export":
            return await asyncio.gather(*map(ask, cores))
        reports: list[KvReport] = []
        for core in cores:
            reports.append(await ask(core))
            if reports[-1].error is None:
                return reports[-1:]
        return reports

    def _take_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _ask(
        self,
        role: Role,
        query: msgspec.Struct,
        query_id: int,
        kind: type[AnswerT],
        timeout_s: float,
        slot: int | None = None,
    ) -> AnswerT:
        pending = _PendingQuery(role, query, asyncio.get_running_loop().create_future(), slot=slot)
        if role is Role.SUPERVISOR:
            self._send(role, 0, query)
        elif role in self._workers.roles_seen_ready:
            self._send_query(pending)
        else:
            raise RequestError(ErrorCode.UNAVAILABLE, f"No {role} process is running yet; try again shortly.")
        self._waiting[query_id] = pending
        try:
            async with asyncio.timeout(timeout_s):
                answer = await pending.answer
        except TimeoutError:
            raise RequestError(
                ErrorCode.TIMEOUT, f"The {role} process did not answer within {timeout_s:g} s; try again."
            ) from None
        finally:
            del self._waiting[query_id]
            self._withdraw(pending)
        assert isinstance(answer, kind), f"query {query_id} to {role} was answered by {type(answer).__name__}"
        return answer

    def _send_query(self, pending: _PendingQuery) -> None:
        """Send a query to a worker, if there is one. A query above the size limit fails."""
        index = self._ledger.pick(pending.role) if pending.slot is None else pending.slot
        try:
            was_sent = index is not None and self._send(pending.role, index, pending.message)
        except FrameTooLarge as error:
            pending.answer.set_exception(too_large(error))
            return
        if index is not None and was_sent:
            pending.index, pending.epoch = index, self._workers.epoch(pending.role, index)
            self._ledger.add(pending.role, index, 1)

    def _withdraw(self, pending: _PendingQuery) -> None:
        if pending.index is not None:
            self._ledger.add(pending.role, pending.index, -1)
            pending.index = None
