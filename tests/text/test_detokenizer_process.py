"""The detokenizer process over real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.small_frames import limit_frames
from tests.text.conftest import DEADLINE_S
from tokenizers import Tokenizer

from quintet.detokenizer_proc import main
from quintet.detokenizer_proc.queries import QueryJob
from quintet.process.child import CONFIG_FILE, error_file
from quintet.process.runtime import Stopping
from quintet.wire import messages as m
from quintet.wire import supervision
from quintet.wire.channels import Channel
from quintet.wire.codec import pack_i32, pack_i64, pack_u8, unpack_i64
from quintet.wire.config import ModelConfig
from quintet.wire.errors import EXIT_CONFIG, ErrorCode
from quintet.wire.ids import RequestIds, Role, WorkerId
from quintet.wire.metrics import decode_snapshot
from quintet.wire.request import Echo, OutputParsing


@pytest.fixture
def harness(
    make_harness: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> Any:
    harness = make_harness(model_of(tokenizers_by_style["byte_level"]), Role.DETOKENIZER)
    harness.start(main.run, main.prepare)
    return harness


def row(
    request_id: int, first: int, ids: list[int], *, finish: int = 0, stop: list[str] | None = None
) -> m.Tokens:
    opens = []
    if first == 0:
        opens = [m.Open(request_id, 0, 0, b"", stop or [], False, True, True, Echo.NONE, False, 0, 0, 0)]
    return m.Tokens(
        1,
        2,
        opens,
        pack_i64([request_id]),
        pack_i32([first]),
        pack_u8([len(ids)]),
        pack_i32(ids),
        pack_u8([finish]),
        b"",
    )


def test_tokens_become_text(harness: Any, tokenizers_by_style: dict[str, Tokenizer]) -> None:
    request_id = RequestIds(0, 1).take()
    ids = tokenizers_by_style["byte_level"].encode("Hello there").ids
    harness.send(row(request_id, 0, ids[:-1]))
    harness.send(row(request_id, len(ids) - 1, ids[-1:], finish=m.FinishReason.LENGTH))
    first, second = harness.wait(harness.frontend, m.Text), harness.wait(harness.frontend, m.Text)
    assert first.deltas[0] + second.deltas[0] == "Hello there"
    assert second.finishes[0].num_output_tokens == len(ids)


def test_a_stop_string_reaches_the_core(harness: Any, tokenizers_by_style: dict[str, Tokenizer]) -> None:
    request_id = RequestIds(0, 1).take()
    harness.send(row(request_id, 0, tokenizers_by_style["byte_level"].encode("Hello there").ids, stop=["lo"]))
    assert harness.wait(harness.frontend, m.Text).finishes[0].stop_reason == "lo"
    assert list(unpack_i64(harness.wait(harness.core, m.StopHit).request_ids)) == [request_id]


def test_undecodable_messages_end_their_requests_with_an_error(harness: Any) -> None:
    """The core also gets a stop hit for an open request."""
    ids = RequestIds(0, 1)
    known, fresh = ids.take(), ids.take()
    harness.send(row(known, 0, [9]))
    harness.wait(harness.frontend, m.Text)
    for request_id in (known, fresh):
        harness.send(row(request_id, 1 if request_id == known else 0, [1 << 30]))
        failed = harness.wait(harness.frontend, m.Failed)
        assert (failed.request_id, failed.code) == (request_id, ErrorCode.INTERNAL)
    assert list(unpack_i64(harness.wait(harness.core, m.StopHit).request_ids)) == [known]
    harness.send(m.DetokenizeQuery(8, 0, b"odd"))
    answer = harness.wait(harness.frontend, m.Detokenized)
    assert answer.query_id == 8 and answer.error.code is ErrorCode.INTERNAL
    last = ids.take()
    harness.send(row(last, 0, [9]))
    assert harness.wait(harness.frontend, m.Text).request_ids == [last]


def test_a_replaced_frontend_gets_no_text_of_its_predecessor(harness: Any) -> None:
    old, new = RequestIds(0, 1).take(), RequestIds(0, 2).take()
    harness.send(row(old, 0, [9]))
    harness.wait(harness.frontend, m.Text)
    successor = WorkerId(Role.FRONTEND, 0, 2)
    inbox = harness.inbox(successor, m.Text)
    try:
        harness.publish(2, successor, harness.core_id)
        harness.send(row(old, 1, [9]))
        harness.send(row(new, 0, [9]))
        assert harness.wait(inbox, m.Text).request_ids == [new]
    finally:
        inbox.close()


def test_text_for_an_unknown_frontend_waits_for_the_topology(harness: Any) -> None:
    """The core may receive the topology with a new frontend before this process."""
    newer, another = RequestIds(0, 2).take(), RequestIds(4, 1).take()
    harness.send(row(newer, 0, [9]))
    harness.send(row(another, 0, [9]))
    workers = [WorkerId(Role.FRONTEND, 0, 2), WorkerId(Role.FRONTEND, 4, 1)]
    inboxes = [harness.inbox(worker, m.Text) for worker in workers]
    try:
        harness.publish(2, *workers, harness.core_id)
        assert harness.wait(inboxes[0], m.Text).request_ids == [newer]
        assert harness.wait(inboxes[1], m.Text).request_ids == [another]
    finally:
        for inbox in inboxes:
            inbox.close()


def test_text_over_the_queue_limit_ends_with_an_error(
    make_harness: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(main, "MAX_QUEUED_TEXTS", 1)
    harness = make_harness(model_of(tokenizers_by_style["byte_level"]), Role.DETOKENIZER)
    harness.start(main.run, main.prepare)
    ids = RequestIds(4, 1)
    kept, lost, ended = ids.take(), ids.take(), ids.take()
    harness.send(row(kept, 0, [9]))
    harness.send(row(lost, 0, [9]))
    harness.send(row(ended, 0, [9], finish=m.FinishReason.LENGTH))
    harness.send(row(lost, 1, [9], finish=m.FinishReason.LENGTH))  # sent before the core received the error
    assert list(unpack_i64(harness.wait(harness.core, m.StopHit).request_ids)) == [lost]
    harness.send(m.DetokenizeQuery(1, 0, b""))
    harness.wait(harness.frontend, m.Detokenized)  # in a batch with the topology, they would be delivered
    newcomer = WorkerId(Role.FRONTEND, 4, 1)
    inbox = harness.inbox(newcomer, m.Text | m.Failed)
    try:
        harness.publish(2, newcomer, harness.frontend_id, harness.core_id)
        assert harness.wait(inbox, (m.Text, m.Failed)).request_ids == [kept]
        failures = [harness.wait(inbox, (m.Text, m.Failed)) for _ in range(2)]
        assert [failed.request_id for failed in failures] == [lost, ended]
        assert failures[0].code is ErrorCode.UNAVAILABLE
    finally:
        inbox.close()
    assert len(caplog.records) == 1


def test_queries_are_answered_between_steps(
    monkeypatch: pytest.MonkeyPatch, harness: Any, tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    seen = threading.Event()
    advance = QueryJob.advance
    started_jobs: list[QueryJob] = []

    def one_slice_until_seen(job: QueryJob) -> m.Detokenized | None:
        if started_jobs and not seen.is_set():
            return None
        started_jobs.append(job)
        return advance(job)

    monkeypatch.setattr(QueryJob, "advance", one_slice_until_seen)
    tokenizer = tokenizers_by_style["byte_level"]
    ids = tokenizer.encode("the quick brown fox <|im_end|>").ids * 5000
    harness.send(m.DetokenizeQuery(7, 0, pack_i32(ids)))
    harness.send(row(RequestIds(0, 1).take(), 0, [9]))
    # The query stops after its first slice until the step's text is sent; a slice of the whole query would fail here.
    assert isinstance(harness.wait(harness.frontend, (m.Text, m.Detokenized)), m.Text)
    seen.set()
    answer = harness.wait(harness.frontend, m.Detokenized)
    assert (answer.query_id, answer.error) == (7, None)
    assert answer.text == tokenizer.decode(ids, skip_special_tokens=False)
    harness.send(m.DetokenizeQuery(8, 0, pack_i32([5, -3])))
    error = harness.wait(harness.frontend, m.Detokenized).error
    assert error.code is ErrorCode.INVALID
    assert "-3" in error.message and error.param == "tokens"


def test_heartbeats_count_open_requests_and_tokens(harness: Any) -> None:
    harness.send(row(RequestIds(0, 1).take(), 0, [9, 10, 11]))
    beat = harness.wait(
        harness.supervisor, supervision.Heartbeat, lambda beat: beat.pending == 1 and beat.metrics
    )
    snapshot = decode_snapshot(beat.metrics)
    counters = {series.name: series.value for series in snapshot.counters}
    assert counters["detokenized_tokens"] == 3
    histograms = {series.name: series for series in snapshot.histograms}
    assert sum(histograms["detokenize_seconds"].counts) == 1
    assert histograms["hop_seconds"].labels == (("hop", "core_detokenizer"),)
    later = harness.wait(harness.supervisor, supervision.Heartbeat)
    assert later.progress > beat.progress  # waiting for the core is not a stall


def start_child(harness: Any) -> subprocess.Popen[bytes]:
    run_dir = Path(harness.config.run_dir)
    harness.config.write(run_dir / CONFIG_FILE)
    command = [sys.executable, "-m", "quintet.detokenizer_proc.main", "--run-dir", str(run_dir)]
    return subprocess.Popen([*command, "--index", "0", "--epoch", "1", "--parent", str(os.getpid())])


def test_the_module_runs_as_a_child(
    make_harness: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    harness = make_harness(model_of(tokenizers_by_style["byte_level"]), Role.DETOKENIZER)
    child = start_child(harness)
    try:
        assert harness.wait_until_ready().pid == child.pid
        harness.send(row(RequestIds(0, 1).take(), 0, [9]))
        assert harness.wait(harness.frontend, m.Text).token_ids == pack_i32([9])
        harness.send(supervision.Stop())
        assert child.wait(DEADLINE_S) == 0
    finally:
        child.kill()
        child.wait()


def test_a_missing_tokenizer_is_a_configuration_error(
    make_harness: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    harness = make_harness(model_of(tokenizers_by_style["byte_level"]), Role.DETOKENIZER)
    (Path(harness.config.model.tokenizer_path) / "tokenizer.json").unlink()
    child = start_child(harness)
    try:
        assert child.wait(DEADLINE_S) == EXIT_CONFIG
    finally:
        child.kill()
        child.wait()
    assert "tokenizer.json does not exist" in error_file(harness.config.run_dir, harness.worker).read_text()


def test_queued_text_is_sent_before_text_received_with_the_topology(
    model_of: Callable[..., ModelConfig], tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    config = model_of(tokenizers_by_style["byte_level"])
    request_id = RequestIds(0, 1).take()
    batches: list[list[object]] = [
        [row(request_id, 0, [9])],
        [row(request_id, 1, [9]), row(request_id, 2, [9]), supervision.Topology(1, [])],
    ]
    process = MagicMock()
    process.me = WorkerId(Role.DETOKENIZER, 0, 1)
    process.config.model = config
    process.pending = 0
    sent: list[m.Text] = []
    process.peers.send = lambda role, index, message: sent.append(message)

    def receive(_timeout_s: float | None) -> list[object]:
        if not batches:
            raise Stopping
        batch = batches.pop(0)
        known = any(isinstance(message, supervision.Topology) for message in batch)
        process.peers.epoch = lambda role, index: 1 if known else None
        return batch

    process.receive = receive
    with pytest.raises(Stopping):
        main.Detokenizer(process, main.prepare(process.config)).run()
    assert [text.first_indexes for text in sent] == [[0], [1], [2]]


def test_an_answer_over_the_message_size_limit_is_an_error(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_frames(monkeypatch, Role.FRONTEND, 2000)
    harness.send(m.DetokenizeQuery(9, 0, pack_i32([9] * 4000)))
    answer = harness.wait(harness.frontend, m.Detokenized)
    assert answer.query_id == 9 and answer.error.code is ErrorCode.TOO_LARGE
    assert "at most 2000 are allowed" in answer.error.message


def test_text_over_the_message_size_limit_ends_its_requests(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_frames(monkeypatch, Role.FRONTEND, 700)
    ids = RequestIds(0, 1)
    large, small = ids.take(), ids.take()
    harness.send(row(large, 0, [9] * 200))
    failed = harness.wait(harness.frontend, m.Failed)
    assert (failed.request_id, failed.code) == (large, ErrorCode.TOO_LARGE)
    assert list(unpack_i64(harness.wait(harness.core, m.StopHit).request_ids)) == [large]
    harness.send(row(small, 0, [9]))
    assert harness.wait(harness.frontend, m.Text).request_ids == [small]


def test_a_query_parses_its_output_like_a_request(
    harness: Any, tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_style["byte_level"]
    ids = tokenizer.encode("so it is</think>the quick brown fox<|im_end|> jumps").ids
    for skips in (True, False):
        opened = m.Open(
            9, 0, 0, b"", [" jum"], False, skips, True, Echo.NONE, False, 0, 0, 0,
            parsing=OutputParsing("deepseek_r1"),
        )  # fmt: skip
        harness.send(m.DetokenizeQuery(9, 0, pack_i32(ids), opened))
        answer = harness.wait(harness.frontend, m.Detokenized)
        end = "" if skips else "<|im_end|>"
        assert answer.text == f"so it isthe quick brown fox{end}"
        assert [(channel, size) for channel, _, size in answer.spans] == [
            (Channel.REASONING, 8),
            (Channel.CONTENT, 19 + len(end)),
        ]
        assert answer.num_reasoning_tokens > 0
