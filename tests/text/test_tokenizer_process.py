"""The tokenizer process over real sockets: admissions, errors, offloaded work, cancellation."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.small_frames import limit_frames
from tests.text.conftest import DEADLINE_S
from tests.wire.respec import changed
from tokenizers import Tokenizer

from quintet.process.child import CONFIG_FILE
from quintet.process.work_journal import REQUEST, WorkId, work_at_death
from quintet.tokenizer_proc import lanes, main
from quintet.tokenizer_proc.encode import Encoder
from quintet.wire import messages as m
from quintet.wire import supervision
from quintet.wire.chat import encode_messages
from quintet.wire.codec import pack_i32, pack_i64, unpack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ErrorCode
from quintet.wire.ids import RequestIds, Role, WorkerId
from quintet.wire.metrics import decode_snapshot
from quintet.wire.params import SamplingParams
from quintet.wire.request import Echo, RequestSpec

LONG = "the quick brown fox " * 1_000
BIG = "the quick brown fox " * 60_000  # 1.2 MB
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def offload_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the results of offloaded work until the test sets this event."""
    opened = threading.Event()

    class GatedExecutor(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            def run_gated() -> Any:
                result = fn(*args, **kwargs)
                opened.wait(DEADLINE_S)
                return result

            return super().submit(run_gated)

    monkeypatch.setattr(lanes, "ThreadPoolExecutor", GatedExecutor)
    yield opened
    opened.set()


@pytest.fixture
def harness(
    make_harness: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> Any:
    model = model_of(
        tokenizers_by_style["byte_level"], max_model_len=1 << 20, chat_templates={"default": CHATML}
    )
    harness = make_harness(model, Role.TOKENIZER)
    harness.start(main.run, main.prepare)
    return harness


def submit(request_id: int, prompt: m.Prompt, **params: Any) -> m.Submit:
    return m.Submit(request_id, prompt, RequestSpec(SamplingParams(**params), 1, 0), 2, 0)


def test_a_text_is_admitted_as_ids(harness: Any, tokenizers_by_style: dict[str, Tokenizer]) -> None:
    request_id = RequestIds(0, 1).take()
    request = submit(request_id, m.TextPrompt("Hello world"), bad_words=["dog"])
    spec = request.spec
    spec.cache_salt, spec.priority, spec.echo = "salt", 3, Echo.PLAIN
    harness.send(request)
    admit = harness.wait(harness.core, m.Admit)
    tokenizer = tokenizers_by_style["byte_level"]
    assert list(unpack_i32(admit.prompt_ids)) == tokenizer.encode("Hello world").ids
    assert (admit.request_id, admit.spec) == (request_id, spec)
    assert tokenizer.encode("dog").ids in admit.bad_word_ids
    assert admit.sent_ns > 2


def test_ids_of_a_resumed_request_pass_through(harness: Any) -> None:
    request = submit(RequestIds(0, 1).take(), m.TokenPrompt(pack_i32([5, 6])))
    request.spec.output_ids, request.spec.choice = pack_i32([7]), 2
    harness.send(request)
    admit = harness.wait(harness.core, m.Admit)
    assert admit.prompt_ids == pack_i32([5, 6])
    assert (admit.spec.output_ids, admit.spec.choice) == (pack_i32([7]), 2)


def test_a_refused_request_fails_at_its_frontend_and_the_next_one_is_served(harness: Any) -> None:
    ids = RequestIds(0, 1)
    harness.send(submit(ids.take(), m.TokenPrompt(pack_i32([1, 999_999]))))
    harness.send(submit(ids.take(), m.ChatPrompt(b"{nonsense")))
    harness.send(submit(ids.take(), m.TokenPrompt(pack_i32([1]))))
    failed = harness.wait(harness.frontend, m.Failed)
    assert failed.code is ErrorCode.INVALID
    assert "999999" in failed.message and failed.param == "prompt"
    assert harness.wait(harness.frontend, m.Failed).param == "messages"
    assert harness.wait(harness.core, m.Admit).prompt_ids == pack_i32([1])


class Panic(BaseException):
    """Stands for a panic of a Rust library."""


@pytest.mark.parametrize("prompt", ["small", LONG], ids=["inline", "in a lane"])
@pytest.mark.parametrize("error", [ValueError, RecursionError, Panic])
def test_an_unexpected_exception_ends_only_its_request(
    harness: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prompt: str,
    error: type[BaseException],
) -> None:
    encode_long = Encoder.encode_long

    def fail(self: Encoder, text: str, *rest: Any) -> Any:
        if text == prompt:
            raise error("a defect")
        return encode_long(self, text, *rest)

    monkeypatch.setattr(Encoder, "encode_long", fail)
    code = ErrorCode.INVALID if error is RecursionError else ErrorCode.INTERNAL
    ids = RequestIds(0, 1)
    failing = ids.take()
    harness.send(submit(failing, m.TextPrompt(prompt)))
    failed = harness.wait(harness.frontend, m.Failed)
    assert (failed.request_id, failed.code) == (failing, code)
    harness.send(m.TokenizeQuery(7, 0, m.TextPrompt(prompt)))
    answer = harness.wait(harness.frontend, m.Tokenized)
    assert (answer.query_id, answer.error.code) == (7, code)
    harness.send(submit(ids.take(), m.TextPrompt("next")))
    assert harness.wait(harness.core, m.Admit).prompt_ids
    logged = [record for record in caplog.records if record.exc_info]
    assert [str(failing) in record.getMessage() for record in logged] == [True, False] * (
        code is ErrorCode.INTERNAL
    )


@pytest.mark.parametrize("prompt", ["small", LONG], ids=["inline", "in a lane"])
def test_the_journal_has_the_work_in_progress(
    harness: Any, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    encode_long = Encoder.encode_long
    work: list[frozenset[WorkId]] = []

    def note(self: Encoder, *arguments: Any) -> Any:
        work.append(work_at_death(harness.config.run_dir, harness.worker))
        return encode_long(self, *arguments)

    monkeypatch.setattr(Encoder, "encode_long", note)
    request_id = RequestIds(0, 1).take()
    harness.send(submit(request_id, m.TextPrompt(prompt)))
    harness.wait(harness.core, m.Admit)
    harness.send(m.TokenizeQuery(8, 0, m.TextPrompt(prompt)))
    harness.wait(harness.frontend, m.Tokenized)
    assert work == [{WorkId(REQUEST, request_id)}, {WorkId(1, 8)}]
    assert work_at_death(harness.config.run_dir, harness.worker) == frozenset()


def test_undecodable_messages_end_with_an_error(harness: Any) -> None:
    """The error of an unknown frontend waits for the topology."""
    ids = RequestIds(0, 1)
    first, unknown = ids.take(), RequestIds(4, 1).take()
    for request_id in (first, unknown):
        harness.send(changed(submit(request_id, m.TextPrompt("x")), core=1 << 40))
    failed = harness.wait(harness.frontend, m.Failed)
    assert (failed.request_id, failed.code) == (first, ErrorCode.INTERNAL)
    second = ids.take()
    harness.send(m.Cancel([second], 1 << 40))
    assert harness.wait(harness.frontend, m.Failed).request_id == second
    harness.send(m.TokenizeQuery(8, 0, "no prompt"))  # type: ignore[arg-type]
    answer = harness.wait(harness.frontend, m.Tokenized)
    assert answer.query_id == 8 and answer.error.code is ErrorCode.INTERNAL
    harness.send(submit(ids.take(), m.TokenPrompt(pack_i32([1]))))
    assert harness.wait(harness.core, m.Admit).prompt_ids == pack_i32([1])
    newcomer = WorkerId(Role.FRONTEND, 4, 1)
    inbox = harness.inbox(newcomer, m.Failed)
    try:
        harness.publish(2, harness.frontend_id, harness.core_id, newcomer)
        assert harness.wait(inbox, m.Failed).request_id == unknown
    finally:
        inbox.close()


def test_a_small_prompt_overtakes_a_megabyte(offload_gate: threading.Event, harness: Any) -> None:
    ids = RequestIds(0, 1)
    big, small = ids.take(), ids.take()
    harness.send(submit(big, m.TextPrompt(BIG)))
    harness.send(submit(small, m.TextPrompt("small")))
    assert harness.wait(harness.core, m.Admit).request_id == small
    offload_gate.set()
    assert harness.wait(harness.core, m.Admit).request_id == big


def test_a_small_prompt_overtakes_big_bad_words(offload_gate: threading.Event, harness: Any) -> None:
    ids = RequestIds(0, 1)
    big, small = ids.take(), ids.take()
    harness.send(submit(big, m.TextPrompt("big"), bad_words=[LONG] * 8))
    harness.send(submit(small, m.TextPrompt("small")))
    assert harness.wait(harness.core, m.Admit).request_id == small
    offload_gate.set()
    assert harness.wait(harness.core, m.Admit).request_id == big


def test_an_offloaded_request_can_be_cancelled(offload_gate: threading.Event, harness: Any) -> None:
    ids = RequestIds(0, 1)
    first = ids.take(2)
    harness.send(submit(first, m.TextPrompt(LONG), n=2))
    harness.send(m.Cancel([first, first + 1], 0))
    last = ids.take()
    harness.send(submit(last, m.TextPrompt("later")))
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).request_id == last
    offload_gate.set()
    assert harness.wait(harness.frontend, (m.Failed, m.Unknown)) == m.Unknown(pack_i64([first, first + 1]))


def test_the_cancel_of_one_offloaded_choice_follows_the_admission(
    offload_gate: threading.Event, harness: Any
) -> None:
    ids = RequestIds(0, 1)
    first, later = ids.take(2), ids.take()
    harness.send(submit(first, m.TextPrompt(LONG), n=2))
    harness.send(m.Cancel([first + 1], 0))
    harness.send(submit(later, m.TextPrompt("later")))
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).request_id == later
    offload_gate.set()
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).request_id == first
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).request_ids == [first + 1]


def test_only_the_newest_attempt_of_an_offloaded_request_is_admitted(
    offload_gate: threading.Event, harness: Any
) -> None:
    ids = RequestIds(0, 1)
    first, later, last = ids.take(2), ids.take(), ids.take()
    older = submit(first, m.TextPrompt(LONG), n=2)
    harness.send(older)
    harness.send(m.Cancel([first, first + 1], 0, moved=True))
    newer = msgspec.structs.replace(older, spec=msgspec.structs.replace(older.spec, attempt=1))
    harness.send(newer)
    harness.send(submit(later, m.TextPrompt("later")))
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).request_id == later
    offload_gate.set()
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).spec.attempt == 1
    harness.send(submit(last, m.TextPrompt("last")))
    harness.send(m.Cancel([last], 0, moved=True))
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).request_id == last
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).moved


def test_an_in_flight_report_is_forwarded_without_local_requests(
    offload_gate: threading.Event, harness: Any
) -> None:
    """Offloaded requests and those waiting for a topology are removed. The core knows the others, or they are lost."""
    ids = RequestIds(0, 1)
    big, small, lost = ids.take(2), ids.take(), ids.take()
    harness.send(submit(big, m.TextPrompt(LONG), n=2))
    harness.send(submit(small, m.TextPrompt("small")))
    report = m.InFlightReport(
        harness.frontend_id, 0, 0, pack_i64([big, big + 1, small, lost]), pack_i32([0, 0, 2, 1])
    )
    harness.send(report)
    remaining = msgspec.structs.replace(
        report, request_ids=pack_i64([small, lost]), attempts=pack_i32([2, 1])
    )
    assert harness.wait(harness.core, m.Admit).request_id == small
    assert harness.wait(harness.core, (m.Admit, m.InFlightReport)) == remaining
    offload_gate.set()
    assert harness.wait(harness.core, (m.Admit, m.InFlightReport)).request_id == big
    harness.send(changed(submit(ids.take(), m.TextPrompt("early")), topology=2))
    harness.send(report)
    harness.publish(2, harness.frontend_id, harness.core_id)
    harness.send(report)
    assert isinstance(harness.wait(harness.core, (m.Admit, m.InFlightReport)), m.Admit)
    assert isinstance(harness.wait(harness.core, (m.Admit, m.InFlightReport)), m.InFlightReport)
    from_unknown_frontend = msgspec.structs.replace(report, sender=WorkerId(Role.FRONTEND, 4, 1))
    harness.send(from_unknown_frontend)
    harness.send(submit(small, m.TextPrompt("small")))
    assert isinstance(harness.wait(harness.core, (m.Admit, m.InFlightReport)), m.Admit)


def test_the_cancel_of_an_admitted_request_is_forwarded_to_the_core(harness: Any) -> None:
    request_id = RequestIds(0, 1).take()
    harness.send(submit(request_id, m.TextPrompt("short")))
    harness.send(m.Cancel([request_id], 0))
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).request_id == request_id
    assert harness.wait(harness.core, (m.Admit, m.Cancel)).request_ids == [request_id]


def test_a_request_with_a_newer_topology_waits_for_it(harness: Any) -> None:
    """The frontend may receive the topology with a new core before this process."""
    ids = RequestIds(0, 1)
    kept, cancelled = ids.take(), ids.take()
    for request_id in (kept, cancelled):
        request = submit(request_id, m.TextPrompt("hi"))
        request.spec.topology = 2
        harness.send(request)
    harness.send(m.Cancel([cancelled], 0))
    successor = WorkerId(Role.CORE, 0, 2)
    inbox = harness.inbox(successor, m.Admit | m.Cancel)
    try:
        harness.publish(2, harness.frontend_id, successor)
        got = [harness.wait(inbox, (m.Admit, m.Cancel)) for _ in range(3)]
        assert [message.request_id for message in got if isinstance(message, m.Admit)] == [kept, cancelled]
        assert isinstance(got[-1], m.Cancel) and got[-1].request_ids == [cancelled]
    finally:
        inbox.close()


def test_a_request_of_an_unknown_frontend_waits_for_the_topology(harness: Any) -> None:
    """Its error could not be sent before. Later requests keep their order."""
    newcomer = WorkerId(Role.FRONTEND, 0, 2)
    refused, accepted = RequestIds(0, 2).take(), RequestIds(0, 1).take()
    harness.send(submit(refused, m.TokenPrompt(b"")))
    harness.send(submit(accepted, m.TokenPrompt(pack_i32([1]))))
    inbox = harness.inbox(newcomer, m.Failed)
    try:
        harness.publish(2, newcomer, harness.core_id)
        assert harness.wait(inbox, m.Failed).request_id == refused
        assert harness.wait(harness.core, m.Admit).request_id == accepted
    finally:
        inbox.close()


@pytest.fixture
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAX_QUEUED_BYTES", 2048)


@pytest.mark.usefixtures("small_queue")
def test_requests_over_the_queue_limit_are_refused(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    newcomer = WorkerId(Role.FRONTEND, 4, 1)
    ids = RequestIds(4, 1)
    kept, refused = ids.take(), ids.take()
    harness.send(submit(kept, m.TokenPrompt(pack_i32([1]))))
    harness.send(submit(refused, m.TextPrompt("x" * 2000)))
    harness.send(m.Cancel([refused, kept], 0))
    harness.send(m.TokenizeQuery(9, 4, m.TextPrompt("x" * 2000)))
    inbox = harness.inbox(newcomer, m.Failed | m.Tokenized)
    try:
        harness.publish(2, newcomer, harness.core_id)
        assert harness.wait(harness.core, m.Admit).request_id == kept
        failed = harness.wait(inbox, (m.Failed, m.Tokenized))
        assert (failed.request_id, failed.code) == (refused, ErrorCode.OVERLOADED)
        answer = harness.wait(inbox, (m.Failed, m.Tokenized))
        assert answer.query_id == 9 and answer.error.code is ErrorCode.OVERLOADED
    finally:
        inbox.close()
    assert len(caplog.records) == 1


def test_queries_are_answered(harness: Any, tokenizers_by_style: dict[str, Tokenizer]) -> None:
    harness.send(m.TokenizeQuery(1, 0, m.TextPrompt("Hello world"), return_token_strs=True))
    answer = harness.wait(harness.frontend, m.Tokenized)
    expected = tokenizers_by_style["byte_level"].encode("Hello world")
    assert list(unpack_i32(answer.token_ids)) == expected.ids
    assert answer.token_strs == expected.tokens
    chat = m.ChatPrompt(encode_messages([{"role": "user", "content": "hi"}]))
    harness.send(m.TokenizeQuery(2, 0, chat))
    ids = unpack_i32(harness.wait(harness.frontend, m.Tokenized).token_ids)
    decoded = tokenizers_by_style["byte_level"].decode(list(ids), skip_special_tokens=False)
    assert decoded == "<|im_start|>user\nhi<|im_end|>\n"
    harness.send(m.TokenizeQuery(3, 0, m.ChatPrompt(encode_messages([]))))
    error = harness.wait(harness.frontend, m.Tokenized).error
    assert error is not None and error.code is ErrorCode.INVALID


def test_an_expired_query_is_not_encoded(harness: Any) -> None:
    harness.send(m.TokenizeQuery(1, 0, m.TextPrompt("late"), until_ns=time.monotonic_ns() - 1))
    answer = harness.wait(harness.frontend, m.Tokenized)
    assert answer.query_id == 1 and answer.error.code is ErrorCode.TIMEOUT and not answer.token_ids
    harness.send(m.TokenizeQuery(2, 0, m.TextPrompt("in time"), until_ns=time.monotonic_ns() + (1 << 40)))
    assert harness.wait(harness.frontend, m.Tokenized).token_ids


def test_heartbeats_have_progress_and_metrics(harness: Any) -> None:
    harness.send(submit(RequestIds(0, 1).take(), m.TextPrompt("x " * 50_000)))
    harness.wait(harness.core, m.Admit)
    beat = harness.wait(
        harness.supervisor, supervision.Heartbeat, lambda beat: beat.progress == 1 and beat.metrics
    )
    assert beat.pending == 0
    series = {series.name: series for series in decode_snapshot(beat.metrics).histograms}
    assert sum(series["tokenize_seconds"].counts) == 1
    assert sum(series["hop_seconds"].counts) == 1
    assert series["tokenized_prompt_tokens"].total > 10_000


def test_the_module_runs_as_a_child(
    make_harness: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    harness = make_harness(model_of(tokenizers_by_style["byte_level"]), Role.TOKENIZER)
    run_dir = Path(harness.config.run_dir)
    harness.config.write(run_dir / CONFIG_FILE)
    command = [sys.executable, "-m", "quintet.tokenizer_proc.main", "--run-dir", str(run_dir)]
    child = subprocess.Popen([*command, "--index", "0", "--epoch", "1", "--parent", str(os.getpid())])
    try:
        assert harness.wait_until_ready().pid == child.pid
        harness.send(submit(RequestIds(0, 1).take(), m.TextPrompt("Hello")))
        assert harness.wait(harness.core, m.Admit).prompt_ids
        harness.send(supervision.Stop())
        assert child.wait(DEADLINE_S) == 0
    finally:
        child.kill()
        child.wait()


def test_an_answer_over_the_message_size_limit_is_an_error(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_frames(monkeypatch, Role.FRONTEND, 2000)
    harness.send(m.TokenizeQuery(9, 0, m.TextPrompt("x" * 4000), return_token_strs=True))
    answer = harness.wait(harness.frontend, m.Tokenized)
    assert answer.query_id == 9 and answer.error.code is ErrorCode.TOO_LARGE
    assert "at most 2000 are allowed" in answer.error.message


def test_a_request_too_large_for_the_core_ends_with_an_error(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_frames(monkeypatch, Role.CORE, 2000)
    ids = RequestIds(0, 1)
    large = changed(submit(ids.take(), m.TextPrompt("x")), cache_salt="y" * 4000)
    harness.send(large)
    failed = harness.wait(harness.frontend, m.Failed)
    assert (failed.request_id, failed.code) == (large.request_id, ErrorCode.TOO_LARGE)
    harness.send(submit(ids.take(), m.TextPrompt("x")))
    assert harness.wait(harness.core, m.Admit).request_id == large.request_id + 1
