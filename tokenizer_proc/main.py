"""The tokenizer process: requests in, admissions out.

Small prompts are encoded at once, in the loop; big ones go to lanes of threads, where encoding releases the
interpreter lock, so that they delay nothing but other big ones.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import uvloop

from quintet.process.malloc_trim import LEFTOVER_BYTES, give_back_memory
from quintet.process.pending_topology import PendingTopology
from quintet.process.runtime import Process, child_main
from quintet.tokenizer_proc.embeds import check_embeds
from quintet.tokenizer_proc.encode import Encoder, load_encoder, size_of
from quintet.tokenizer_proc.offloaded import OffloadedRequests
from quintet.tokenizer_proc.senders import refusal_of, sender_of
from quintet.tokenizer_proc.structured import Forms
from quintet.tokenizer_proc.thinking import Budgets
from quintet.wire.codec import encode, pack_i32, pack_i64, unpack_i32, unpack_i64
from quintet.wire.config import EngineConfig
from quintet.wire.dropped import Dropped
from quintet.wire.embeds import EmbedsPrompt, digest_of
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId, epoch_tag, frontend_of, is_newer
from quintet.wire.limits import FrameTooLarge
from quintet.wire.messages import (
    Admit,
    Cancel,
    Failed,
    InFlightReport,
    Submit,
    Tokenized,
    TokenizeQuery,
    Unknown,
)
from quintet.wire.metrics import COUNT_BUCKETS
from quintet.wire.supervision import Drain, Drained, Topology

Message = Submit | Cancel | InFlightReport | TokenizeQuery

INLINE_BYTES = 8 << 10
"""Prompts up to this size are encoded in the loop: a few milliseconds at most."""

LANES = ((256 << 10, 2), (1 << 62, 1))
"""Sizes up to which a lane takes prompts, and its threads: a huge prompt does not keep big ones waiting either."""

ALLOWANCE_S, SLOWEST_BYTES_PER_S = 1.0, 200 << 10
"""How long encoding a prompt in a lane may take, on a busy machine, before it counts as a stall."""

MAX_EARLY_BYTES = 64 << 20
"""Messages kept for frontends that the topology has not named yet, each with `EARLY_OVERHEAD`; more are refused."""

EARLY_OVERHEAD = 1 << 10

MAX_REFUSALS = 1 << 16
"""Such refusals that are kept until their frontends are named."""

Result = TypeVar("Result")


class Tokenizer:
    """Handlers of the process's messages."""

    def __init__(
        self,
        process: Process[Message],
        encoder: Encoder,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._process = process
        self._encoder = encoder
        self._forms = Forms(process.config.model, is_mock=process.config.executor.kind == "mock")
        self._budgets = Budgets(
            process.config.model.parsers.thinks, lambda text: encoder.encode(text, add_special_tokens=False)
        )
        self._loop = loop
        self._lanes = [(size, ThreadPoolExecutor(threads, "lane")) for size, threads in LANES]
        self._laned = OffloadedRequests()
        self._due_s: dict[object, float] = {}
        """When each prompt that a lane encodes just now should be done (`time.monotonic`)."""
        process.account = self._account
        self._is_retiring = False
        self._early: PendingTopology[tuple[int, int | None], msgspec.Struct] = PendingTopology(
            MAX_EARLY_BYTES, lambda message: len(encode(message)) + EARLY_OVERHEAD
        )
        """By frontend slot and its epoch's tag."""
        self._refusals: list[tuple[int, int | None, Failed | Tokenized | Unknown]] = []
        """Answers to what was too much to wait, or was dropped, with the frontend's index and epoch's tag."""
        metrics = process.metrics
        self._hop = metrics.histogram(
            "hop_seconds", "Time of a message from sender to receiver.", hop="frontend_tokenizer"
        )
        self._seconds = metrics.histogram("tokenize_seconds", "Time to turn a prompt into ids.")
        self._sizes = metrics.histogram("tokenized_prompt_tokens", "Tokens of a prompt.", COUNT_BUCKETS)
        self._num_differences = metrics.counter(
            "audit_differences", "Requests that two processes did not agree on, twice in a row."
        )
        self._num_failed = metrics.counter("tokenizer_refusals", "Requests refused before admission.")

    def handle(self, message: msgspec.Struct) -> None:
        """Take one message. What comes from a frontend that knows a newer topology waits for that."""
        if isinstance(message, Topology):
            for each in self._early.take():
                self.handle(each)
            self._send_refusals()
            self._check_drained()
            return
        if isinstance(message, Drain):
            self._is_retiring = True
            self._check_drained()
            return
        if isinstance(message, Dropped):
            self._end_dropped(message)
            return
        sender = sender_of(message)
        if sender is None:
            return
        index, tag = sender
        version = message.spec.topology if isinstance(message, Submit) else 0
        if isinstance(message, InFlightReport) and (sender in self._early or self._is_unnamed(index, tag)):
            return  # some of what it names waits here; the next account comes soon
        if sender in self._early or version > self._process.topology.version or self._is_unnamed(index, tag):
            self._keep(index, tag, message)
        else:
            self._handle(message)

    def _end_dropped(self, dropped: Dropped) -> None:
        """End what a message carried that was dropped on its way here."""
        error = dropped.error(Role.TOKENIZER)
        if dropped.query_id is not None and dropped.frontend is not None:
            failed = Failed(dropped.query_id, error.code, error.message)
            self._refusals.append((dropped.frontend, None, Tokenized(dropped.query_id, b"", None, failed)))
        for request_id in dropped.request_ids:
            failed = Failed(request_id, error.code, error.message)
            self._refusals.append((*frontend_of(request_id), failed))
        self._send_refusals()

    def _pass_on(self, account: InFlightReport) -> None:
        """Send on which requests have left for the core: all but those in lanes."""
        ids, attempts = unpack_i64(account.request_ids), unpack_i32(account.attempts)
        left = [
            (request_id, attempt)
            for request_id, attempt in zip(ids, attempts, strict=True)
            if request_id not in self._laned
        ]
        account.request_ids = pack_i64(request_id for request_id, _ in left)
        account.attempts = pack_i32(attempt for _, attempt in left)
        self._process.peers.send(Role.CORE, account.core, account)

    def _keep(self, index: int, tag: int | None, message: msgspec.Struct) -> None:
        """Keep a message for the next topology, or only its refusal where too much is kept already."""
        if self._early.keep((index, tag), message):
            return
        if not self._refusals:
            self._process.log.warning(
                "%d bytes wait for frontends that no topology has named; more requests are refused",
                self._early.size,
            )
        refusal = refusal_of(message)
        if refusal is not None and len(self._refusals) < MAX_REFUSALS:
            self._refusals.append((index, tag, refusal))

    def _send_refusals(self) -> None:
        refusals, self._refusals = self._refusals, []
        for index, tag, refusal in refusals:
            if self._is_unnamed(index, tag):
                self._refusals.append((index, tag, refusal))
            elif isinstance(refusal, Failed):
                self._fail(refusal)
            elif isinstance(refusal, Unknown):
                self._tell(unpack_i64(refusal.request_ids)[0], refusal)
            else:
                self._process.peers.send(Role.FRONTEND, index, refusal)

    def _is_unnamed(self, index: int, tag: int | None) -> bool:
        """Whether an answer could not be sent yet: the frontend heard of this process before this one of it."""
        epoch = self._process.peers.epoch(Role.FRONTEND, index)
        return epoch is None or (tag is not None and is_newer(tag, epoch))

    def _handle(self, message: object) -> None:
        match message:
            case Submit():
                self._hop.observe((time.monotonic_ns() - message.sent_ns) / 1e9)
                self._submit(message)
            case Cancel():
                self._cancel(message)
            case InFlightReport():
                self._pass_on(message)
            case TokenizeQuery():
                self._dispatch(
                    size_of(message.prompt),
                    lambda: self._answer(message),
                    lambda answer: self._send_answer(message, answer),
                )
            case _:
                pass

    def close(self) -> None:
        """Wait for the prompts being encoded and forget the others."""
        for _, lane in self._lanes:
            lane.shutdown(cancel_futures=True)

    def _dispatch(self, size: int, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """Do ``work`` here or in a lane, as its `size_of` says; ``done`` gets its result in the loop."""

        def timed() -> tuple[Result, int, int]:
            began_ns = time.monotonic_ns()
            return work(), began_ns, time.monotonic_ns()

        def finish(result: Result, began_ns: int, ended_ns: int) -> None:
            self._process.progress += 1
            self._seconds.observe((ended_ns - began_ns) / 1e9)
            self._process.span("encode", size, began_ns, ended_ns)
            done(result)

        if size <= INLINE_BYTES:
            finish(*timed())
            return
        job = object()
        self._process.pending += 1

        def clocked() -> tuple[Result, int, int]:
            self._due_s[job] = time.monotonic() + ALLOWANCE_S + size / SLOWEST_BYTES_PER_S
            try:
                return timed()
            finally:
                del self._due_s[job]
                if size >= LEFTOVER_BYTES:
                    give_back_memory()  # before the next one of the lane takes as much

        def land(future: Future[tuple[Result, int, int]]) -> None:
            self._process.pending -= 1
            finish(*future.result())
            if size >= LEFTOVER_BYTES:
                lane.submit(give_back_memory)
            self._check_drained()

        def on_done(future: Future[tuple[Result, int, int]]) -> None:
            if not future.cancelled():
                self._loop.call_soon_threadsafe(land, future)

        lane = next(lane for limit, lane in self._lanes if size <= limit)
        lane.submit(clocked).add_done_callback(on_done)

    def _check_drained(self) -> None:
        """Tell the supervisor when this process is to leave and has nothing left."""
        if self._is_retiring and not self._process.pending and not self._early:
            self._process.peers.send(Role.SUPERVISOR, 0, Drained(self._process.me))

    def _account(self) -> tuple[int, int]:
        """Return progress, and how many prompts take longer to encode than their size explains."""
        if not self._process.pending and self._laned:
            num_lost = len(self._laned)
            self._num_differences.inc(num_lost)
            self._process.log.warning(
                "nothing is being encoded, but %d entries wait for it: dropped", num_lost
            )
            self._laned.clear()
        now_s = time.monotonic()
        return self._process.progress, sum(due_s < now_s for due_s in list(self._due_s.values()))

    def _submit(self, submit: Submit) -> None:
        size = size_of(submit.prompt, submit.spec.params.bad_words)
        if not self._forms.is_known(submit.spec.params):
            size = max(
                size, INLINE_BYTES + 1
            )  # building a grammar takes a moment, the library's first one a second
        if size > INLINE_BYTES:
            self._laned.enter(submit)
        admit = self._admit if size <= INLINE_BYTES else self._land
        self._dispatch(size, lambda: self._admission(submit), lambda result: admit(submit, result))

    def _admission(self, submit: Submit) -> Admit | Failed:
        """Encode; may run in a lane, so it touches no state."""
        params, prompt = submit.spec.params, submit.prompt
        embeds = prompt if isinstance(prompt, EmbedsPrompt) else None
        try:
            if embeds is not None:
                check_embeds(submit.spec, embeds, self._process.config)
            ids = self._encoder.prompt_ids(prompt, params, limit_gives_way=submit.limit_gives_way)
            bad_words = self._encoder.bad_word_ids(params.bad_words)
            params = self._forms.enforceable(submit.spec, lambda: self._end_of(ids, embeds))
            params = self._budgets.bounded(params, lambda: self._end_of(ids, embeds))
            ends = self._encoder.ends_of(prompt)
            if ends and not params.ignore_eos:
                stops = [*params.stop_token_ids, *ends]
                params = msgspec.structs.replace(params, stop_token_ids=list(dict.fromkeys(stops)))
            spec = submit.spec
            if params is not spec.params:
                spec = msgspec.structs.replace(spec, params=params)
        except RequestError as error:
            return Failed(submit.request_id, error.code, error.message, error.param)
        if embeds is not None:
            embeds = msgspec.structs.replace(embeds, digest=digest_of(embeds))
        return Admit(submit.request_id, pack_i32(ids), spec, 0, bad_words, embeds)

    def _end_of(self, ids: Sequence[int], embeds: EmbedsPrompt | None) -> str:
        """Return the text of a prompt's last tokens; of vectors nobody knows any."""
        return self._encoder.end_of(ids) if embeds is None else ""

    def _land(self, submit: Submit, result: Admit | Failed) -> None:
        """Pass on what a lane has encoded, unless its frontend goes on with it elsewhere."""
        cancelled = self._laned.leave(submit)
        if cancelled is not None:
            self._admit(submit, result, cancelled)

    def _admit(self, submit: Submit, result: Admit | Failed, cancelled: Collection[int] = ()) -> None:
        if isinstance(result, Failed):
            self._fail(result)
        elif len(cancelled) == submit.spec.params.n:
            self._tell(submit.request_id, Unknown(pack_i64(sorted(cancelled))))
        else:
            self._sizes.observe(len(result.prompt_ids) // 4)
            result.sent_ns = time.monotonic_ns()
            try:
                self._process.peers.send(Role.CORE, submit.core, result)
            except FrameTooLarge as error:
                self._fail(
                    Failed(submit.request_id, ErrorCode.TOO_LARGE, f"the request is too large: {error}.")
                )
                return
            if cancelled:
                self._process.peers.send(Role.CORE, submit.core, Cancel(sorted(cancelled), submit.core))

    def _fail(self, failed: Failed) -> None:
        self._num_failed.inc()
        self._tell(failed.request_id, failed)

    def _tell(self, request_id: int, message: Failed | Unknown) -> None:
        """Send to the frontend that made this id, unless it is gone."""
        index, tag = frontend_of(request_id)
        epoch = self._process.peers.epoch(Role.FRONTEND, index)
        if epoch is not None and epoch_tag(epoch) == tag:
            self._process.peers.send(Role.FRONTEND, index, message)

    def _cancel(self, cancel: Cancel) -> None:
        """Forward, but for requests in lanes: the core does not know them yet, so their cancelling waits for them."""
        rest = self._laned.cancel(cancel)
        if rest is not None:
            self._process.peers.send(Role.CORE, cancel.core, rest)

    def _answer(self, query: TokenizeQuery) -> Tokenized:
        try:
            if query.until_ns is not None and time.monotonic_ns() > query.until_ns:
                raise RequestError(ErrorCode.TIMEOUT, "The question waited too long for a lane; ask again.")
            ids = self._encoder.whole(query.prompt)
        except RequestError as error:
            failed = Failed(query.query_id, error.code, error.message, error.param)
            return Tokenized(query.query_id, b"", None, failed)
        strs = self._encoder.token_strs(ids) if query.return_token_strs else None
        return Tokenized(query.query_id, pack_i32(ids), strs)

    def _send_answer(self, query: TokenizeQuery, answer: Tokenized) -> None:
        try:
            self._process.peers.send(Role.FRONTEND, query.frontend, answer)
        except FrameTooLarge as error:
            words = f"the answer has {error.num_bytes} bytes, and at most {error.most} can be told at a time; ask for less."
            failed = Failed(query.query_id, ErrorCode.TOO_LARGE, words)
            self._process.peers.send(
                Role.FRONTEND, query.frontend, Tokenized(query.query_id, b"", None, failed)
            )


def prepare(config: EngineConfig) -> Encoder:
    """Do the long part of booting: it depends on no slot."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return load_encoder(config.model)


def run(me: WorkerId, config: EngineConfig, encoder: Encoder) -> None:
    """Be the tokenizer at slot ``me`` until stopped; an exception of ours ends the process."""
    process: Process[Message] = Process(me, config, Message)
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    service = Tokenizer(process, encoder, loop)
    endings: list[BaseException] = []

    def end(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        endings.append(context.get("exception") or RuntimeError(context["message"]))
        loop.stop()

    loop.set_exception_handler(end)
    process.attach(loop, service.handle)
    process.ready(chat_templates=", ".join(encoder.template_names) or "none")
    try:
        loop.run_forever()
    finally:
        service.close()
        loop.close()
        process.close()
    raise endings[0]


if __name__ == "__main__":
    child_main(Role.TOKENIZER, run, prepare)
