"""The tokenizer process over real sockets: admissions, refusals, lanes, cancelling."""

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

from quintet.process.runtime import CONFIG_FILE
from quintet.tokenizer_proc import main
from quintet.wire import messages as m
from quintet.wire import supervision
from quintet.wire.codec import pack_i32, pack_i64, unpack_i32
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ErrorCode
from quintet.wire.ids import RequestIds, Role, WorkerId
from quintet.wire.metrics import decode_snapshot
from quintet.wire.params import SamplingParams
from quintet.wire.request import Echo, RequestSpec

LANED = "the quick brown fox " * 1_000
BIG = "the quick brown fox " * 60_000  # 1.2 MB
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What is encoded in a lane is not done before the test says so: however long others take, it is still there."""
    let_go = threading.Event()

    class Held(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            def held() -> Any:
                result = fn(*args, **kwargs)
                let_go.wait(DEADLINE_S)
                return result

            return super().submit(held)

    monkeypatch.setattr(main, "ThreadPoolExecutor", Held)
    yield let_go
    let_go.set()


@pytest.fixture
def world(
    make_world: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> Any:
    model = model_of(
        tokenizers_by_style["byte_level"], max_model_len=1 << 20, chat_templates={"default": CHATML}
    )
    world = make_world(model, Role.TOKENIZER)
    world.start(main.run, main.prepare)
    return world


def submit(request_id: int, prompt: m.Prompt, **params: Any) -> m.Submit:
    return m.Submit(request_id, prompt, RequestSpec(SamplingParams(**params), 1, 0), 2, 0)


def test_a_text_is_admitted_as_ids(world: Any, tokenizers_by_style: dict[str, Tokenizer]) -> None:
    request_id = RequestIds(0, 1).take()
    request = submit(request_id, m.TextPrompt("Hello world"), bad_words=["dog"])
    spec = request.spec
    spec.cache_salt, spec.priority, spec.echo = "salt", 3, Echo.PLAIN
    world.send(request)
    admit = world.wait(world.core, m.Admit)
    tokenizer = tokenizers_by_style["byte_level"]
    assert list(unpack_i32(admit.prompt_ids)) == tokenizer.encode("Hello world").ids
    assert (admit.request_id, admit.spec) == (request_id, spec)
    assert tokenizer.encode("dog").ids in admit.bad_word_ids
    assert admit.sent_ns > 2


def test_ids_of_a_resumed_request_pass_through(world: Any) -> None:
    request = submit(RequestIds(0, 1).take(), m.TokenPrompt(pack_i32([5, 6])))
    request.spec.output_ids, request.spec.choice = pack_i32([7]), 2
    world.send(request)
    admit = world.wait(world.core, m.Admit)
    assert admit.prompt_ids == pack_i32([5, 6])
    assert (admit.spec.output_ids, admit.spec.choice) == (pack_i32([7]), 2)


def test_a_refused_request_fails_at_its_frontend_and_the_next_one_is_served(world: Any) -> None:
    ids = RequestIds(0, 1)
    world.send(submit(ids.take(), m.TokenPrompt(pack_i32([1, 999_999]))))
    world.send(submit(ids.take(), m.ChatPrompt(b"{nonsense")))
    world.send(submit(ids.take(), m.TokenPrompt(pack_i32([1]))))
    failed = world.wait(world.frontend, m.Failed)
    assert failed.code is ErrorCode.INVALID
    assert "999999" in failed.message and failed.param == "prompt"
    assert world.wait(world.frontend, m.Failed).param == "messages"
    assert world.wait(world.core, m.Admit).prompt_ids == pack_i32([1])


def test_what_is_dropped_on_its_way_in_ends_with_an_error(world: Any) -> None:
    """Each has a number that cannot be; whose it is goes to the frontend that waits, once it is known."""
    ids = RequestIds(0, 1)
    first, stranger = ids.take(), RequestIds(4, 1).take()
    for request_id in (first, stranger):
        world.send(changed(submit(request_id, m.TextPrompt("x")), core=1 << 40))
    failed = world.wait(world.frontend, m.Failed)
    assert (failed.request_id, failed.code) == (first, ErrorCode.INTERNAL)
    second = ids.take()
    world.send(m.Cancel([second], 1 << 40))
    assert world.wait(world.frontend, m.Failed).request_id == second
    world.send(m.TokenizeQuery(8, 0, "no prompt"))  # type: ignore[arg-type]
    answer = world.wait(world.frontend, m.Tokenized)
    assert answer.query_id == 8 and answer.error.code is ErrorCode.INTERNAL
    world.send(submit(ids.take(), m.TokenPrompt(pack_i32([1]))))
    assert world.wait(world.core, m.Admit).prompt_ids == pack_i32([1])
    late = WorkerId(Role.FRONTEND, 4, 1)
    inbox = world.inbox(late, m.Failed)
    try:
        world.publish(2, world.frontend_id, world.core_id, late)
        assert world.wait(inbox, m.Failed).request_id == stranger
    finally:
        inbox.close()


def test_a_small_prompt_overtakes_a_megabyte(lanes: threading.Event, world: Any) -> None:
    ids = RequestIds(0, 1)
    big, small = ids.take(), ids.take()
    world.send(submit(big, m.TextPrompt(BIG)))
    world.send(submit(small, m.TextPrompt("small")))
    assert world.wait(world.core, m.Admit).request_id == small
    lanes.set()
    assert world.wait(world.core, m.Admit).request_id == big


def test_a_small_prompt_overtakes_big_bad_words(lanes: threading.Event, world: Any) -> None:
    ids = RequestIds(0, 1)
    big, small = ids.take(), ids.take()
    world.send(submit(big, m.TextPrompt("big"), bad_words=[LANED] * 8))
    world.send(submit(small, m.TextPrompt("small")))
    assert world.wait(world.core, m.Admit).request_id == small
    lanes.set()
    assert world.wait(world.core, m.Admit).request_id == big


def test_cancelling_a_request_in_a_lane_ends_it_there(lanes: threading.Event, world: Any) -> None:
    ids = RequestIds(0, 1)
    first = ids.take(2)
    world.send(submit(first, m.TextPrompt(LANED), n=2))
    world.send(m.Cancel([first, first + 1], 0))
    last = ids.take()
    world.send(submit(last, m.TextPrompt("later")))
    assert world.wait(world.core, (m.Admit, m.Cancel)).request_id == last
    lanes.set()
    assert world.wait(world.frontend, (m.Failed, m.Unknown)) == m.Unknown(pack_i64([first, first + 1]))


def test_cancelling_one_choice_in_a_lane_follows_the_admission(lanes: threading.Event, world: Any) -> None:
    ids = RequestIds(0, 1)
    first, later = ids.take(2), ids.take()
    world.send(submit(first, m.TextPrompt(LANED), n=2))
    world.send(m.Cancel([first + 1], 0))
    world.send(submit(later, m.TextPrompt("later")))
    assert world.wait(world.core, (m.Admit, m.Cancel)).request_id == later
    lanes.set()
    assert world.wait(world.core, (m.Admit, m.Cancel)).request_id == first
    assert world.wait(world.core, (m.Admit, m.Cancel)).request_ids == [first + 1]


def test_what_goes_on_at_another_engine_leaves_a_lane_in_its_newest_attempt_alone(
    lanes: threading.Event, world: Any
) -> None:
    ids = RequestIds(0, 1)
    first, later, last = ids.take(2), ids.take(), ids.take()
    older = submit(first, m.TextPrompt(LANED), n=2)
    world.send(older)
    world.send(m.Cancel([first, first + 1], 0, moved=True))
    newer = msgspec.structs.replace(older, spec=msgspec.structs.replace(older.spec, attempt=1))
    world.send(newer)
    world.send(submit(later, m.TextPrompt("later")))
    assert world.wait(world.core, (m.Admit, m.Cancel)).request_id == later
    lanes.set()
    assert world.wait(world.core, (m.Admit, m.Cancel)).spec.attempt == 1
    world.send(submit(last, m.TextPrompt("last")))
    world.send(m.Cancel([last], 0, moved=True))
    assert world.wait(world.core, (m.Admit, m.Cancel)).request_id == last
    assert world.wait(world.core, (m.Admit, m.Cancel)).moved


def test_an_account_goes_on_without_what_is_here_still(lanes: threading.Event, world: Any) -> None:
    """In lanes, or waiting for a topology; so the core knows all that it names, or it is lost."""
    ids = RequestIds(0, 1)
    big, small, lost = ids.take(2), ids.take(), ids.take()
    world.send(submit(big, m.TextPrompt(LANED), n=2))
    world.send(submit(small, m.TextPrompt("small")))
    account = m.InFlightReport(
        world.frontend_id, 0, 0, pack_i64([big, big + 1, small, lost]), pack_i32([0, 0, 2, 1])
    )
    world.send(account)
    left = msgspec.structs.replace(account, request_ids=pack_i64([small, lost]), attempts=pack_i32([2, 1]))
    assert world.wait(world.core, m.Admit).request_id == small
    assert world.wait(world.core, (m.Admit, m.InFlightReport)) == left
    lanes.set()
    assert world.wait(world.core, (m.Admit, m.InFlightReport)).request_id == big
    world.send(changed(submit(ids.take(), m.TextPrompt("early")), topology=2))
    world.send(account)
    world.publish(2, world.frontend_id, world.core_id)
    world.send(account)
    assert isinstance(world.wait(world.core, (m.Admit, m.InFlightReport)), m.Admit)
    assert isinstance(world.wait(world.core, (m.Admit, m.InFlightReport)), m.InFlightReport)
    stranger = msgspec.structs.replace(account, sender=WorkerId(Role.FRONTEND, 4, 1))
    world.send(stranger)
    world.send(submit(small, m.TextPrompt("small")))
    assert isinstance(world.wait(world.core, (m.Admit, m.InFlightReport)), m.Admit)


def test_cancel_of_an_admitted_request_goes_on_to_the_core(world: Any) -> None:
    request_id = RequestIds(0, 1).take()
    world.send(submit(request_id, m.TextPrompt("short")))
    world.send(m.Cancel([request_id], 0))
    assert world.wait(world.core, (m.Admit, m.Cancel)).request_id == request_id
    assert world.wait(world.core, (m.Admit, m.Cancel)).request_ids == [request_id]


def test_a_request_sent_by_a_newer_topology_waits_for_it(world: Any) -> None:
    """The frontend may hear of a new core before this process does."""
    ids = RequestIds(0, 1)
    kept, gone = ids.take(), ids.take()
    for request_id in (kept, gone):
        request = submit(request_id, m.TextPrompt("hi"))
        request.spec.topology = 2
        world.send(request)
    world.send(m.Cancel([gone], 0))
    successor = WorkerId(Role.CORE, 0, 2)
    inbox = world.inbox(successor, m.Admit | m.Cancel)
    try:
        world.publish(2, world.frontend_id, successor)
        got = [world.wait(inbox, (m.Admit, m.Cancel)) for _ in range(3)]
        assert [message.request_id for message in got if isinstance(message, m.Admit)] == [kept, gone]
        assert isinstance(got[-1], m.Cancel) and got[-1].request_ids == [gone]
    finally:
        inbox.close()


def test_a_request_of_a_frontend_not_named_yet_waits_for_the_topology(world: Any) -> None:
    """A refusal could not be sent otherwise. What follows keeps its place behind it."""
    newcomer = WorkerId(Role.FRONTEND, 0, 2)
    refused, accepted = RequestIds(0, 2).take(), RequestIds(0, 1).take()
    world.send(submit(refused, m.TokenPrompt(b"")))
    world.send(submit(accepted, m.TokenPrompt(pack_i32([1]))))
    inbox = world.inbox(newcomer, m.Failed)
    try:
        world.publish(2, newcomer, world.core_id)
        assert world.wait(inbox, m.Failed).request_id == refused
        assert world.wait(world.core, m.Admit).request_id == accepted
    finally:
        inbox.close()


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAX_QUEUED_BYTES", 2048)


@pytest.mark.usefixtures("little_room")
def test_what_is_too_much_to_wait_is_refused(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    newcomer = WorkerId(Role.FRONTEND, 4, 1)
    ids = RequestIds(4, 1)
    kept, refused = ids.take(), ids.take()
    world.send(submit(kept, m.TokenPrompt(pack_i32([1]))))
    world.send(submit(refused, m.TextPrompt("x" * 2000)))
    world.send(m.Cancel([refused, kept], 0))
    world.send(m.TokenizeQuery(9, 4, m.TextPrompt("x" * 2000)))
    inbox = world.inbox(newcomer, m.Failed | m.Tokenized)
    try:
        world.publish(2, newcomer, world.core_id)
        assert world.wait(world.core, m.Admit).request_id == kept
        failed = world.wait(inbox, (m.Failed, m.Tokenized))
        assert (failed.request_id, failed.code) == (refused, ErrorCode.OVERLOADED)
        answer = world.wait(inbox, (m.Failed, m.Tokenized))
        assert answer.query_id == 9 and answer.error.code is ErrorCode.OVERLOADED
    finally:
        inbox.close()
    assert len(caplog.records) == 1


def test_queries_are_answered(world: Any, tokenizers_by_style: dict[str, Tokenizer]) -> None:
    world.send(m.TokenizeQuery(1, 0, m.TextPrompt("Hello world"), return_token_strs=True))
    answer = world.wait(world.frontend, m.Tokenized)
    expected = tokenizers_by_style["byte_level"].encode("Hello world")
    assert list(unpack_i32(answer.token_ids)) == expected.ids
    assert answer.token_strs == expected.tokens
    chat = m.ChatPrompt(msgspec.json.encode([{"role": "user", "content": "hi"}]))
    world.send(m.TokenizeQuery(2, 0, chat))
    ids = unpack_i32(world.wait(world.frontend, m.Tokenized).token_ids)
    decoded = tokenizers_by_style["byte_level"].decode(list(ids), skip_special_tokens=False)
    assert decoded == "<|im_start|>user\nhi<|im_end|>\n"
    world.send(m.TokenizeQuery(3, 0, m.ChatPrompt(b"[]")))
    error = world.wait(world.frontend, m.Tokenized).error
    assert error is not None and error.code is ErrorCode.INVALID


def test_a_question_for_which_nobody_waits_any_more_is_not_encoded(world: Any) -> None:
    world.send(m.TokenizeQuery(1, 0, m.TextPrompt("late"), until_ns=time.monotonic_ns() - 1))
    answer = world.wait(world.frontend, m.Tokenized)
    assert answer.query_id == 1 and answer.error.code is ErrorCode.TIMEOUT and not answer.token_ids
    world.send(m.TokenizeQuery(2, 0, m.TextPrompt("in time"), until_ns=time.monotonic_ns() + (1 << 40)))
    assert world.wait(world.frontend, m.Tokenized).token_ids


def test_heartbeats_tell_of_lanes_and_figures(world: Any) -> None:
    world.send(submit(RequestIds(0, 1).take(), m.TextPrompt("x " * 50_000)))
    world.wait(world.core, m.Admit)
    beat = world.wait(
        world.supervisor, supervision.Heartbeat, lambda beat: beat.progress == 1 and beat.metrics
    )
    assert beat.pending == 0
    series = {series.name: series for series in decode_snapshot(beat.metrics).histograms}
    assert sum(series["tokenize_seconds"].counts) == 1
    assert sum(series["hop_seconds"].counts) == 1
    assert series["tokenized_prompt_tokens"].total > 10_000


def test_the_module_runs_as_a_child(
    make_world: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    world = make_world(model_of(tokenizers_by_style["byte_level"]), Role.TOKENIZER)
    run_dir = Path(world.config.run_dir)
    world.config.write(run_dir / CONFIG_FILE)
    command = [sys.executable, "-m", "quintet.tokenizer_proc.main", "--run-dir", str(run_dir)]
    child = subprocess.Popen([*command, "--index", "0", "--epoch", "1", "--parent", str(os.getpid())])
    try:
        assert world.greet().pid == child.pid
        world.send(submit(RequestIds(0, 1).take(), m.TextPrompt("Hello")))
        assert world.wait(world.core, m.Admit).prompt_ids
        world.send(supervision.Stop())
        assert child.wait(DEADLINE_S) == 0
    finally:
        child.kill()
        child.wait()


def test_an_answer_too_large_to_be_told_is_an_error(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_frames(monkeypatch, Role.FRONTEND, 2000)
    world.send(m.TokenizeQuery(9, 0, m.TextPrompt("x" * 4000), return_token_strs=True))
    answer = world.wait(world.frontend, m.Tokenized)
    assert answer.query_id == 9 and answer.error.code is ErrorCode.TOO_LARGE
    assert "at most 2000 are allowed" in answer.error.message


def test_a_request_too_large_for_the_core_ends_with_an_error(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_frames(monkeypatch, Role.CORE, 2000)
    ids = RequestIds(0, 1)
    large = changed(submit(ids.take(), m.TextPrompt("x")), cache_salt="y" * 4000)
    world.send(large)
    failed = world.wait(world.frontend, m.Failed)
    assert (failed.request_id, failed.code) == (large.request_id, ErrorCode.TOO_LARGE)
    world.send(submit(ids.take(), m.TextPrompt("x")))
    assert world.wait(world.core, m.Admit).request_id == large.request_id + 1
