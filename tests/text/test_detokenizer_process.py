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
from quintet.detokenizer_proc.main import QueryJob
from quintet.process.runtime import CONFIG_FILE, Stopping, error_file
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
def world(
    make_world: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> Any:
    world = make_world(model_of(tokenizers_by_style["byte_level"]), Role.DETOKENIZER)
    world.start(main.run, main.prepare)
    return world


def row(
    request_id: int, first: int, ids: list[int], *, finish: int = 0, stop: list[str] | None = None
) -> m.Tokens:
    opens = []
    if first == 0:
        opens = [
            m.Open(request_id, 0, 0, b"", stop or [], False, True, True, True, Echo.NONE, False, 0, 0, 0)
        ]
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


def test_tokens_become_text(world: Any, tokenizers_by_style: dict[str, Tokenizer]) -> None:
    request_id = RequestIds(0, 1).take()
    ids = tokenizers_by_style["byte_level"].encode("Hello there").ids
    world.send(row(request_id, 0, ids[:-1]))
    world.send(row(request_id, len(ids) - 1, ids[-1:], finish=m.FinishReason.LENGTH))
    first, second = world.wait(world.frontend, m.Text), world.wait(world.frontend, m.Text)
    assert first.deltas[0] + second.deltas[0] == "Hello there"
    assert second.finishes[0].num_output_tokens == len(ids)


def test_a_stop_string_reaches_the_core(world: Any, tokenizers_by_style: dict[str, Tokenizer]) -> None:
    request_id = RequestIds(0, 1).take()
    world.send(row(request_id, 0, tokenizers_by_style["byte_level"].encode("Hello there").ids, stop=["lo"]))
    assert world.wait(world.frontend, m.Text).finishes[0].stop_reason == "lo"
    assert list(unpack_i64(world.wait(world.core, m.StopHit).request_ids)) == [request_id]


def test_what_is_dropped_on_its_way_in_ends_with_an_error(world: Any) -> None:
    """Of one that is open, the core hears as well: what it computes, nobody could be told."""
    ids = RequestIds(0, 1)
    known, fresh = ids.take(), ids.take()
    world.send(row(known, 0, [9]))
    world.wait(world.frontend, m.Text)
    for request_id in (known, fresh):
        world.send(row(request_id, 1 if request_id == known else 0, [1 << 30]))
        failed = world.wait(world.frontend, m.Failed)
        assert (failed.request_id, failed.code) == (request_id, ErrorCode.INTERNAL)
    assert list(unpack_i64(world.wait(world.core, m.StopHit).request_ids)) == [known]
    world.send(m.DetokenizeQuery(8, 0, b"odd"))
    answer = world.wait(world.frontend, m.Detokenized)
    assert answer.query_id == 8 and answer.error.code is ErrorCode.INTERNAL
    last = ids.take()
    world.send(row(last, 0, [9]))
    assert world.wait(world.frontend, m.Text).request_ids == [last]


def test_a_replaced_frontend_gets_nothing_of_its_predecessor(world: Any) -> None:
    old, new = RequestIds(0, 1).take(), RequestIds(0, 2).take()
    world.send(row(old, 0, [9]))
    world.wait(world.frontend, m.Text)
    successor = WorkerId(Role.FRONTEND, 0, 2)
    inbox = world.inbox(successor, m.Text)
    try:
        world.publish(2, successor, world.core_id)
        world.send(row(old, 1, [9]))
        world.send(row(new, 0, [9]))
        assert world.wait(inbox, m.Text).request_ids == [new]
    finally:
        inbox.close()


def test_text_for_a_frontend_not_named_yet_waits_for_the_topology(world: Any) -> None:
    """The core may hear of a new frontend before this process does."""
    newer, another = RequestIds(0, 2).take(), RequestIds(4, 1).take()
    world.send(row(newer, 0, [9]))
    world.send(row(another, 0, [9]))
    workers = [WorkerId(Role.FRONTEND, 0, 2), WorkerId(Role.FRONTEND, 4, 1)]
    inboxes = [world.inbox(worker, m.Text) for worker in workers]
    try:
        world.publish(2, *workers, world.core_id)
        assert world.wait(inboxes[0], m.Text).request_ids == [newer]
        assert world.wait(inboxes[1], m.Text).request_ids == [another]
    finally:
        for inbox in inboxes:
            inbox.close()


def test_what_is_too_much_to_wait_ends_with_an_error(
    make_world: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(main, "MAX_QUEUED_TEXTS", 1)
    world = make_world(model_of(tokenizers_by_style["byte_level"]), Role.DETOKENIZER)
    world.start(main.run, main.prepare)
    ids = RequestIds(4, 1)
    kept, lost, ended = ids.take(), ids.take(), ids.take()
    world.send(row(kept, 0, [9]))
    world.send(row(lost, 0, [9]))
    world.send(row(ended, 0, [9], finish=m.FinishReason.LENGTH))
    world.send(row(lost, 1, [9], finish=m.FinishReason.LENGTH))  # crossed the core's hearing of it
    assert list(unpack_i64(world.wait(world.core, m.StopHit).request_ids)) == [lost]
    world.send(m.DetokenizeQuery(1, 0, b""))
    world.wait(world.frontend, m.Detokenized)  # in a batch with the topology, they would be delivered
    newcomer = WorkerId(Role.FRONTEND, 4, 1)
    inbox = world.inbox(newcomer, m.Text | m.Failed)
    try:
        world.publish(2, newcomer, world.frontend_id, world.core_id)
        assert world.wait(inbox, (m.Text, m.Failed)).request_ids == [kept]
        failures = [world.wait(inbox, (m.Text, m.Failed)) for _ in range(2)]
        assert [failed.request_id for failed in failures] == [lost, ended]
        assert failures[0].code is ErrorCode.UNAVAILABLE
    finally:
        inbox.close()
    assert len(caplog.records) == 1


def test_queries_are_answered_while_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, world: Any, tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    seen = threading.Event()
    advance = QueryJob.advance
    begun: list[QueryJob] = []

    def one_slice_until_seen(job: QueryJob) -> m.Detokenized | None:
        if begun and not seen.is_set():
            return None
        begun.append(job)
        return advance(job)

    monkeypatch.setattr(QueryJob, "advance", one_slice_until_seen)
    tokenizer = tokenizers_by_style["byte_level"]
    ids = tokenizer.encode("the quick brown fox <|im_end|>").ids * 5000
    world.send(m.DetokenizeQuery(7, 0, pack_i32(ids)))
    world.send(row(RequestIds(0, 1).take(), 0, [9]))
    # The query cannot go on past its first slice before the step's text is here: only a slice that is all of it could.
    assert isinstance(world.wait(world.frontend, (m.Text, m.Detokenized)), m.Text)
    seen.set()
    answer = world.wait(world.frontend, m.Detokenized)
    assert (answer.query_id, answer.error) == (7, None)
    assert answer.text == tokenizer.decode(ids, skip_special_tokens=False)
    world.send(m.DetokenizeQuery(8, 0, pack_i32([5, -3])))
    error = world.wait(world.frontend, m.Detokenized).error
    assert error.code is ErrorCode.INVALID
    assert "-3" in error.message and error.param == "tokens"


def test_heartbeats_count_open_requests_and_tokens(world: Any) -> None:
    world.send(row(RequestIds(0, 1).take(), 0, [9, 10, 11]))
    beat = world.wait(
        world.supervisor, supervision.Heartbeat, lambda beat: beat.pending == 1 and beat.metrics
    )
    snapshot = decode_snapshot(beat.metrics)
    counters = {series.name: series.value for series in snapshot.counters}
    assert counters["detokenized_tokens"] == 3
    histograms = {series.name: series for series in snapshot.histograms}
    assert sum(histograms["detokenize_seconds"].counts) == 1
    assert histograms["hop_seconds"].labels == (("hop", "core_detokenizer"),)
    later = world.wait(world.supervisor, supervision.Heartbeat)
    assert later.progress > beat.progress  # waiting for the core is no stall


def start_child(world: Any) -> subprocess.Popen[bytes]:
    run_dir = Path(world.config.run_dir)
    world.config.write(run_dir / CONFIG_FILE)
    command = [sys.executable, "-m", "quintet.detokenizer_proc.main", "--run-dir", str(run_dir)]
    return subprocess.Popen([*command, "--index", "0", "--epoch", "1", "--parent", str(os.getpid())])


def test_the_module_runs_as_a_child(
    make_world: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    world = make_world(model_of(tokenizers_by_style["byte_level"]), Role.DETOKENIZER)
    child = start_child(world)
    try:
        assert world.greet().pid == child.pid
        world.send(row(RequestIds(0, 1).take(), 0, [9]))
        assert world.wait(world.frontend, m.Text).token_ids == pack_i32([9])
        world.send(supervision.Stop())
        assert child.wait(DEADLINE_S) == 0
    finally:
        child.kill()
        child.wait()


def test_a_missing_tokenizer_is_a_configuration_error(
    make_world: Callable[..., Any],
    model_of: Callable[..., ModelConfig],
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    world = make_world(model_of(tokenizers_by_style["byte_level"]), Role.DETOKENIZER)
    (Path(world.config.model.tokenizer_path) / "tokenizer.json").unlink()
    child = start_child(world)
    try:
        assert child.wait(DEADLINE_S) == EXIT_CONFIG
    finally:
        child.kill()
        child.wait()
    assert "tokenizer.json does not exist" in error_file(world.config.run_dir, world.worker).read_text()


def test_what_waited_for_a_topology_goes_out_before_what_came_with_it(
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
    told: list[m.Text] = []
    process.peers.send = lambda role, index, message: told.append(message)

    def receive(_timeout_s: float | None) -> list[object]:
        if not batches:
            raise Stopping
        batch = batches.pop(0)
        known = any(isinstance(message, supervision.Topology) for message in batch)
        process.peers.epoch = lambda role, index: 1 if known else None
        return batch

    process.receive = receive
    with pytest.raises(Stopping):
        main.Detokenizer(process, main.tables_of(config)).run()
    assert [text.first_indexes for text in told] == [[0], [1], [2]]


def test_an_answer_too_large_to_be_told_is_an_error(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_frames(monkeypatch, Role.FRONTEND, 2000)
    world.send(m.DetokenizeQuery(9, 0, pack_i32([9] * 4000)))
    answer = world.wait(world.frontend, m.Detokenized)
    assert answer.query_id == 9 and answer.error.code is ErrorCode.TOO_LARGE
    assert "at most 2000 are allowed" in answer.error.message


def test_text_too_large_to_be_told_ends_its_requests(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_frames(monkeypatch, Role.FRONTEND, 700)
    ids = RequestIds(0, 1)
    large, small = ids.take(), ids.take()
    world.send(row(large, 0, [9] * 200))
    failed = world.wait(world.frontend, m.Failed)
    assert (failed.request_id, failed.code) == (large, ErrorCode.TOO_LARGE)
    assert list(unpack_i64(world.wait(world.core, m.StopHit).request_ids)) == [large]
    world.send(row(small, 0, [9]))
    assert world.wait(world.frontend, m.Text).request_ids == [small]


def test_an_output_is_read_as_the_one_of_a_request(
    world: Any, tokenizers_by_style: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_style["byte_level"]
    ids = tokenizer.encode("so it is</think>the quick brown fox<|im_end|> jumps").ids
    for skips in (True, False):
        opened = m.Open(
            9, 0, 0, b"", [" jum"], False, skips, True, True, Echo.NONE, False, 0, 0, 0,
            parsing=OutputParsing("deepseek_r1"),
        )  # fmt: skip
        world.send(m.DetokenizeQuery(9, 0, pack_i32(ids), opened))
        answer = world.wait(world.frontend, m.Detokenized)
        end = "" if skips else "<|im_end|>"
        assert answer.text == f"so it isthe quick brown fox{end}"
        assert [(channel, size) for channel, _, size in answer.spans] == [
            (Channel.REASONING, 8),
            (Channel.CONTENT, 19 + len(end)),
        ]
        assert answer.num_reasoning_tokens > 0
