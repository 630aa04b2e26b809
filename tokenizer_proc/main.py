"""Main loop of the tokenizer process: receives requests from frontends, sends admissions to cores.

Small prompts are encoded in the event loop. Large prompts go to lanes (thread pools by size): encoding releases the
GIL, so a large prompt delays only other large prompts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
import uvloop

from quintet.process.child import child_main
from quintet.process.pending_topology import PendingTopology
from quintet.process.runtime import Process
from quintet.process.work_journal import REQUEST, Journal, WorkId, entries_of, open_journal
from quintet.tokenizer_proc import answers
from quintet.tokenizer_proc.encode import Encoder, load_encoder, size_of
from quintet.tokenizer_proc.lanes import Lanes, OffloadedRequests
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
"""Maximum size of prompts encoded in the loop; takes at most a few milliseconds."""

MAX_QUEUED_BYTES, QUEUED_OVERHEAD = 64 << 20, 1 << 10
"""Bytes of messages queued for frontends not in the topology yet, with the overhead of each; more are rejected."""

MAX_QUEUED_ERRORS = 1 << 16
"""Error answers queued for frontends not in the topology yet."""

Result = TypeVar("Result")


class Tokenizer:
    """Message handlers of the process."""

    def __init__(
        self, process: Process[Message], encoder: Encoder, loop: asyncio.AbstractEventLoop, journal: Journal
    ) -> None:
        self._process = process
        self._encoder = encoder
        self._forms = Forms(process.config.model, is_mock=process.config.executor.kind == "mock")
        self._budgets = Budgets(
            process.config.model.parsers.thinks, lambda text: encoder.encode(text, add_special_tokens=False)
        )
        self._lanes = Lanes(loop)
        self._offloaded = OffloadedRequests()
        self._journal = journal
        process.account = self._report_progress
        self._is_retiring = False
        self._queued = PendingTopology[tuple[int, int | None], msgspec.Struct](
            MAX_QUEUED_BYTES, lambda message: len(encode(message)) + QUEUED_OVERHEAD
        )
        """Queued messages by the frontend's index and epoch tag."""
        self._queued_errors: list[tuple[int, int | None, Failed | Tokenized | Unknown]] = []
        """Answers to rejected or dropped messages, with the frontend's index and epoch tag."""
        metrics = process.metrics
        self._hop = metrics.histogram(
            "hop_seconds", "Time of a message from sender to receiver.", hop="frontend_tokenizer"
        )
        self._seconds = metrics.histogram("tokenize_seconds", "Time to turn a prompt into ids.")
        self._sizes = metrics.histogram("tokenized_prompt_tokens", "Tokens of a prompt.", COUNT_BUCKETS)
        self._num_differences = metrics.counter(
            "request_state_mismatches", "Requests open in only one of two processes, twice in a row."
        )
        self._num_failed = metrics.counter("tokenizer_refusals", "Requests rejected before admission.")

    def handle(self, message: msgspec.Struct) -> None:
        """Handle one message. A message based on a newer topology is queued until that topology arrives."""
        if isinstance(message, Topology):
            for each in self._queued.take():
                self.handle(each)
            self._send_queued_errors()
            self._check_drained()
            return
        if isinstance(message, Drain):
            self._is_retiring = True
            self._check_drained()
            return
        if isinstance(message, Dropped):
            self._queued_errors += answers.dropped_answers(message)
            self._send_queued_errors()
            return
        sender = sender_of(message)
        if sender is None:
            return
        is_early = sender in self._queued.waiting or self._is_unknown_frontend(*sender)
        if isinstance(message, InFlightReport) and is_early:
            return  # some of its requests are still queued; frontends repeat the report
        version = message.spec.topology if isinstance(message, Submit) else 0
        if is_early or version > self._process.topology.version:
            self._keep(*sender, message)
        else:
            self._handle(message)

    def _forward_report(self, report: InFlightReport) -> None:
        """Forward the report to the core without the requests that are still in lanes."""
        ids, attempts = unpack_i64(report.request_ids), unpack_i32(report.attempts)
        left = [
            (request_id, attempt)
            for request_id, attempt in zip(ids, attempts, strict=True)
            if request_id not in self._offloaded
        ]
        report.request_ids = pack_i64(request_id for request_id, _ in left)
        report.attempts = pack_i32(attempt for _, attempt in left)
        self._process.peers.send(Role.CORE, report.core, report)

    def _keep(self, index: int, tag: int | None, message: msgspec.Struct) -> None:
        """Queue a message for the next topology. If the queue is full, queue only its error answer."""
        if self._queued.enqueue((index, tag), message):
            return
        if not self._queued_errors:
            self._process.log.warning(
                "%d bytes queued for frontends that are not in the topology; further requests are rejected",
                self._queued.size,
            )
        error = answers.error_answer(message)
        if error is not None and len(self._queued_errors) < MAX_QUEUED_ERRORS:
            self._queued_errors.append((index, tag, error))

    def _send_queued_errors(self) -> None:
        queued, self._queued_errors = self._queued_errors, []
        for index, tag, error in queued:
            if self._is_unknown_frontend(index, tag):
                self._queued_errors.append((index, tag, error))
            elif isinstance(error, Failed):
                self._fail(error)
            elif isinstance(error, Unknown):
                self._send_to_frontend(unpack_i64(error.request_ids)[0], error)
            else:
                self._process.peers.send(Role.FRONTEND, index, error)

    def _is_unknown_frontend(self, index: int, tag: int | None) -> bool:
        """Return whether the frontend, or its epoch, is not in this process's topology yet."""
        epoch = self._process.peers.epoch(Role.FRONTEND, index)
        return epoch is None or (tag is not None and is_newer(tag, epoch))

    def _handle(self, message: object) -> None:
        match message:
            case Submit():
                self._hop.observe((time.monotonic_ns() - message.sent_ns) / 1e9)
                self._submit(message)
            case Cancel():
                # Requests in lanes are cancelled when they leave the lane.
                rest = self._offloaded.cancel(message)
                if rest is not None:
                    self._process.peers.send(Role.CORE, message.core, rest)
            case InFlightReport():
                self._forward_report(message)
            case TokenizeQuery():
                work = WorkId(1 + message.frontend, message.query_id)
                self._dispatch(
                    size_of(message.prompt),
                    lambda: self._isolated(work, lambda: answers.tokenized(self._encoder, message)),
                    lambda result: answers.send_answer(self._process.peers, message, result),
                )
            case _:
                pass

    def close(self) -> None:
        """Finish the prompts being encoded and drop the queued ones."""
        self._lanes.close()

    def _dispatch(self, size: int, work: Callable[[], Result], done: Callable[[Result], None]) -> None:
        """Run ``work`` inline or in a lane, by ``size``; call ``done`` with its result in the event loop."""

        def finish(result: Result, began_ns: int, ended_ns: int) -> None:
            self._process.progress += 1
            self._seconds.observe((ended_ns - began_ns) / 1e9)
            self._process.span("encode", size, began_ns, ended_ns)
            done(result)

        if size <= INLINE_BYTES:
            began_ns = time.monotonic_ns()
            result = work()
            finish(result, began_ns, time.monotonic_ns())
            return
        self._process.pending += 1

        def finish_offloaded(result: Result, began_ns: int, ended_ns: int) -> None:
            self._process.pending -= 1
            finish(result, began_ns, ended_ns)
            self._check_drained()

        self._lanes.run(size, work, finish_offloaded)

    def _check_drained(self) -> None:
        """Send `Drained` to the supervisor if this process is draining and idle."""
        if self._is_retiring and not self._process.pending and not self._queued.waiting:
            self._process.peers.send(Role.SUPERVISOR, 0, Drained(self._process.me))

    def _report_progress(self) -> tuple[int, int]:
        """Return the progress, and the number of prompts past their encoding deadline."""
        if not self._process.pending and self._offloaded:
            num_lost = len(self._offloaded)
            self._num_differences.inc(num_lost)
            self._process.log.warning("reconcile: %d requests waited for idle lanes; dropped", num_lost)
            self._offloaded.clear()
        return self._process.progress, self._lanes.num_late

    def _submit(self, submit: Submit) -> None:
        size = size_of(submit.prompt, submit.spec.params.bad_words)
        form = submit.spec.params.structured_outputs
        if form is not None and not self._forms.is_known(form):
            # use a lane: building a grammar is slow, and the library's first one takes a second
            size = max(size, INLINE_BYTES + 1)
        if size > INLINE_BYTES:
            self._offloaded.add(submit)
        admit = self._admit if size <= INLINE_BYTES else self._finish_offloaded
        self._dispatch(size, lambda: self._admission(submit), lambda result: admit(submit, result))

    def _admission(self, submit: Submit) -> Admit | Failed:
        """Return the admission, or the failure of the request. May run in a lane's thread, so it mutates no state."""
        result = self._isolated(WorkId(REQUEST, submit.request_id), lambda: self._encoded(submit))
        if isinstance(result, RequestError):
            return Failed(submit.request_id, result.code, result.message, result.param)
        return result

    def _isolated(self, work: WorkId, encode: Callable[[], Result]) -> Result | RequestError:
        """Run ``encode`` with an entry in the journal; convert any exception to the error of its request."""
        entry = self._journal.pop()
        entry[0], entry[1] = work
        try:
            return encode()
        except BaseException as error:  # noqa: BLE001 - one request must not end the process
            return answers.request_error(error, str(work), self._process.log)
        finally:
            entry[1] = 0
            self._journal.append(entry)

    def _encoded(self, submit: Submit) -> Admit:
        """Encode the prompt and finalize the parameters. Raises `RequestError`."""
        params, prompt = submit.spec.params, submit.prompt
        embeds = prompt if isinstance(prompt, EmbedsPrompt) else None
        if embeds is not None:
            answers.check_embeds(submit.spec, embeds, self._process.config)
        is_pooled, clamp = submit.spec.pooling is not None, submit.clamp_max_tokens
        ids = self._encoder.prompt_ids(prompt, params, clamp_max_tokens=clamp, is_pooled=is_pooled)
        bad_words = self._encoder.bad_word_ids(params.bad_words) if params.bad_words else []
        if params.structured_outputs is not None:
            params = self._forms.enforceable(submit.spec, lambda: self._prompt_end(submit, ids))
        if params.thinking_token_budget is not None:
            params = self._budgets.bounded(params, lambda: self._prompt_end(submit, ids))
        ends = self._encoder.ends_of(prompt)
        if ends and not params.ignore_eos:
            stops = [*params.stop_token_ids, *ends]
            params = msgspec.structs.replace(params, stop_token_ids=list(dict.fromkeys(stops)))
        spec = submit.spec
        if params is not spec.params:
            spec = msgspec.structs.replace(spec, params=params)
        spans = []
        if embeds is not None:
            spans = [msgspec.structs.replace(embeds.span, digest=digest_of(embeds.span))]
        return Admit(submit.request_id, pack_i32(ids), spec, 0, bad_words, spans)

    def _prompt_end(self, submit: Submit, ids: Sequence[int]) -> str:
        """Return the text that shows the state of reasoning before the output; empty for prompt embeddings."""
        if submit.spec.parsing is not None and submit.spec.parsing.prompt_end:
            return submit.spec.parsing.prompt_end
        return "" if isinstance(submit.prompt, EmbedsPrompt) else self._encoder.end_of(ids)

    def _finish_offloaded(self, submit: Submit, result: Admit | Failed) -> None:
        """Forward a lane's result, unless the frontend moved the request to another attempt."""
        cancelled = self._offloaded.remove(submit)
        if cancelled is not None:
            self._admit(submit, result, cancelled)

    def _admit(self, submit: Submit, result: Admit | Failed, cancelled: Collection[int] = ()) -> None:
        if isinstance(result, Failed):
            self._fail(result)
        elif len(cancelled) == submit.spec.params.n:
            self._send_to_frontend(submit.request_id, Unknown(pack_i64(sorted(cancelled))))
        else:
            self._sizes.observe(len(result.prompt_ids) // 4)
            result.sent_ns = time.monotonic_ns()
            try:
                self._process.peers.send(Role.CORE, submit.core, result)
            except FrameTooLarge as error:
                cause = f"The request exceeds the message size limit: {error}."
                self._fail(Failed(submit.request_id, ErrorCode.TOO_LARGE, cause))
                return
            if cancelled:
                self._process.peers.send(Role.CORE, submit.core, Cancel(sorted(cancelled), submit.core))

    def _fail(self, failed: Failed) -> None:
        self._num_failed.inc()
        self._send_to_frontend(failed.request_id, failed)

    def _send_to_frontend(self, request_id: int, message: Failed | Unknown) -> None:
        """Send to the frontend that created the request id, unless it was replaced."""
        index, tag = frontend_of(request_id)
        epoch = self._process.peers.epoch(Role.FRONTEND, index)
        if epoch is not None and epoch_tag(epoch) == tag:
            self._process.peers.send(Role.FRONTEND, index, message)


def sender_of(message: object) -> tuple[int, int | None] | None:
    """Return the frontend's index and its epoch tag, if the message has it; None for other messages."""
    match message:
        case Submit():
            return frontend_of(message.request_id)
        case Cancel(request_ids=[first, *_]):
            return frontend_of(first)
        case InFlightReport():
            return message.sender.index, epoch_tag(message.sender.epoch)
        case TokenizeQuery():
            return message.frontend, None
        case _:
            return None


def prepare(config: EngineConfig) -> Encoder:
    """Load the encoder. Independent of the slot, so a standby process calls it in advance."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return load_encoder(config.model)


def run(me: WorkerId, config: EngineConfig, encoder: Encoder) -> None:
    """Run the tokenizer process in slot ``me`` until stopped. An unhandled exception ends the process."""
    process: Process[Message] = Process(me, config, Message)
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    service = Tokenizer(process, encoder, loop, entries_of(open_journal(config.run_dir, me)))
    endings: list[BaseException] = []

    def end(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        endings.append(context.get("exception") or RuntimeError(context["message"]))
        loop.stop()

    loop.set_exception_handler(end)
    process.attach(loop, service.handle)
    process.ready(chat_templates=", ".join(encoder.templates.names) or "none")
    try:
        loop.run_forever()
    finally:
        service.close()
        loop.close()
        process.close()
    raise endings[0]


if __name__ == "__main__":
    child_main(Role.TOKENIZER, run, prepare)
