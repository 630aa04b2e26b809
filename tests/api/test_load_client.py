"""Load client: framing at every byte boundary, failures by kind, seeded workloads, results."""

from __future__ import annotations

import json
from array import array
from collections import Counter

import msgspec
import pytest

from quintet.deploy.http_client.connection import BadUrl, Connection, Target
from quintet.deploy.http_client.pool import ask
from quintet.deploy.tools.load_client.load import Load, Outcome, Run, run_load
from quintet.deploy.tools.load_client.report import (
    Acceptance,
    acceptance,
    acceptance_lines,
    counters_of,
    summarise,
    table,
)
from quintet.deploy.tools.load_client.tally import StreamTally
from quintet.deploy.tools.load_client.workload import (
    BadWorkload,
    Item,
    PromptSpec,
    RequestShape,
    poisson_arrivals,
    random_prompts,
    read_prompts,
)
from tests.api.toy_server import chunked, frames, sized, toy_server

USAGE = '{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":3}}}'
COMPLETION = [
    frames('{"choices":[{"text":"a"}]}'),
    b": keep-alive\n\n",
    frames('{"choices":[{"text":"data: not a frame\\ndata: nor this"}]}', '{"choices":[{"text":"c"}]}'),
    frames('{"choices":[{"text":"d","finish_reason":"length"}]}', USAGE, "[DONE]"),
]
CHAT = [
    frames('{"choices":[{"delta":{"role":"assistant","content":""}}]}'),
    frames('{"choices":[{"delta":{"content":"a"}}]}'),
    frames('{"choices":[{"delta":{"content":"b"}}]}'),
    frames('{"choices":[{"delta":{"content":"c"}}]}'),
    frames('{"choices":[{"delta":{"content":"d"}}]}'),
    frames('{"choices":[{"delta":{},"finish_reason":"stop"}]}', USAGE, "[DONE]"),
]


class FakeLoop:
    """Event loop that creates futures only: `Connection` needs nothing else."""

    def create_future(self) -> FakeFuture:
        return FakeFuture()


class FakeFuture:
    def __init__(self) -> None:
        self.result: object = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def set_result(self, result: object) -> None:
        self.result = result

    def set_exception(self, error: BaseException) -> None:
        self.error = error


def feed(wire: bytes, cuts: list[int]) -> tuple[FakeFuture, StreamTally]:
    """Give ``wire`` to a connection, cut at ``cuts``; return its future and the sink's counts."""
    import asyncio

    class Transport(asyncio.Transport):
        def write(self, data: object) -> None:
            pass

        def is_closing(self) -> bool:
            return False

        def abort(self) -> None:
            pass

    connection = Connection(FakeLoop())  # type: ignore[arg-type]
    connection.connection_made(Transport())
    tally = StreamTally()
    future = connection.send(b"", tally)
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        connection.data_received(wire[start:end])
    tally.finish(0.0)
    return future, tally  # type: ignore[return-value]


@pytest.mark.parametrize("payloads", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_counts_are_independent_of_chunks(payloads: list[bytes]) -> None:
    wire = chunked(*payloads)
    splits = [[cut] for cut in range(1, len(wire))] + [list(range(1, len(wire)))]
    for cuts in splits:
        future, tally = feed(wire, cuts)
        assert future.done() and future.error is None, cuts
        assert tally.num_events == 4, cuts
        assert sum(tally.read_events) == 4, cuts
        assert len(tally.read_events) == len(tally.read_times_s), cuts
        assert tally.done and tally.usage is not None and tally.usage.completion_tokens == 4, cuts


def test_frames_split_over_chunks_count_once() -> None:
    body = b"".join(COMPLETION)
    _, tally = feed(chunked(*(body[i : i + 1] for i in range(len(body)))), [])
    assert tally.num_events == 4 and tally.done


def test_long_streams_are_trimmed_without_losing_count() -> None:
    text = "x" * 300
    payloads = [frames(f'{{"choices":[{{"text":"{text}"}}]}}')] * 2000 + [frames(USAGE, "[DONE]")]
    _, tally = feed(chunked(*payloads), [])
    assert tally.num_events == 2000 and tally.done and tally.usage is not None


def test_carriage_returns_end_lines() -> None:
    payloads = [p.replace(b"\n", b"\r\n") for p in CHAT]
    _, tally = feed(chunked(*payloads), [])
    assert tally.num_events == 4 and tally.done


def load_of(url: str, num: int = 3, concurrency: int = 2, timeout_s: float = 5.0) -> Load:
    return Load(Target.parse(url), "/v1/completions", [b"{}"] * num, concurrency, timeout_s=timeout_s)


def test_whole_run_over_keep_alive() -> None:
    with toy_server(lambda path, body, number: [chunked(*COMPLETION)]) as server:
        run = run_load(load_of(server.url, num=20))
    summary = summarise(run)
    assert (summary.num_completed, summary.output_tokens, summary.output_events) == (20, 80, 80)
    assert (summary.prompt_tokens, summary.cached_prompt_tokens, summary.has_usage) == (140, 60, True)
    assert summary.ttft_ms is not None and summary.ttft_ms.count == 20
    assert summary.inter_token_ms is not None and summary.inter_token_ms.count == 60
    assert server.num_connections == 2
    assert "20 of 20 completed" in table(summary)


def test_sized_and_unsized_bodies() -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    body = b"".join(COMPLETION)

    def script(path: str, _: bytes, number: int) -> list[bytes]:
        if number == 1:
            return [f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body]
        return [f"{head}Connection: close\r\n\r\n".encode(), body]

    with toy_server(script) as server:
        summary = summarise(run_load(load_of(server.url, num=6)))
    assert summary.num_completed == 6 and summary.output_tokens == 24


def test_failures_are_counted_by_kind_with_messages() -> None:
    overloaded = json.dumps({"error": {"message": "try later", "type": "overloaded"}}).encode()
    failing = frames('{"choices":[{"text":"a"}]}', '{"error":{"message":"lost","type":"x"}}', "[DONE]")
    answers: dict[bytes, list[bytes] | None] = {
        b"busy": [sized("429 Too Many Requests", overloaded)],
        b"gone": None,
        b"half": [chunked(*COMPLETION)[:150], b"Connection: close"],
        b"late": [],
        b"error": [chunked(failing)],
        b"undone": [chunked(*COMPLETION[:3])],
        b"alien": [b"SSH-2.0-OpenSSH\r\n"],
        b"good": [chunked(*COMPLETION)],
    }

    def script(path: str, body: bytes, number: int) -> list[bytes] | None:
        answer = answers[body]
        return [b"HTTP/1.1 100 Continue\r\n\r\n"] if answer == [] else answer

    with toy_server(script) as server:
        load = Load(Target.parse(server.url), "/", list(answers), concurrency=1, timeout_s=2.0)
        summary = summarise(run_load(load))
    kinds = {failure.kind: failure.example for failure in summary.failures}
    assert summary.num_completed == 1
    assert kinds["HTTP 429"] == "try later"
    assert kinds["error in the stream"] == "lost"
    assert "within 2 s" in kinds["timeout"]
    assert "stream without [DONE]" in kinds
    assert sum(failure.count for failure in summary.failures) == 7
    assert "try later" in table(summary)


def test_refused_connection_is_an_outcome() -> None:
    with toy_server(lambda *_: None) as server:
        url = server.url
    summary = summarise(run_load(load_of(url, num=2)))
    assert summary.failures[0].kind == "refused" and summary.failures[0].count == 2


def test_connection_closed_while_idle_is_replaced() -> None:
    seen: list[int] = []

    def script(path: str, body: bytes, number: int) -> list[bytes] | None:
        seen.append(number)
        return None if seen.count(number) == 2 else [chunked(*COMPLETION)]

    with toy_server(script) as server:
        summary = summarise(run_load(load_of(server.url, num=4, concurrency=1)))
    assert summary.num_completed == 4 and not summary.failures


def test_connection_with_excess_bytes_is_closed() -> None:
    more = [chunked(*COMPLETION), chunked(*COMPLETION)[:40], chunked(*COMPLETION) + b"garbage"]
    for extra in (b"".join(more[:2]), more[2]):
        with toy_server(lambda *_, extra=extra: [extra]) as server:  # type: ignore[misc]
            summary = summarise(run_load(load_of(server.url, num=3, concurrency=1)))
        assert (summary.num_completed, summary.output_tokens, server.num_connections) == (3, 12, 3)


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "does not speak HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "does not speak HTTP/1.1"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
            "does not speak HTTP/1.1",
        ),
        (b"HTTP/1.1 100 Continue\r\nConnection: close\r\n\r\n", "during the response"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Le", "during the response"),
    ],
)
def test_invalid_response_is_a_failure(wire: bytes, words: str) -> None:
    with (
        toy_server(lambda *_: [wire]) as server,
        pytest.raises(ConnectionError, match=words),
    ):
        ask(Target.parse(server.url), "GET", "/")


def test_poisson_arrivals_depend_on_the_seed_only() -> None:
    first, again, other = (poisson_arrivals(4000, 50.0, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] == 0.0 and list(first) == sorted(first)
    assert 4000 / first[-1] == pytest.approx(50.0, rel=0.1)


def test_requests_are_sent_at_their_arrival_times() -> None:
    arrivals = poisson_arrivals(30, 300.0, 3)
    with toy_server(lambda *_: [chunked(*COMPLETION)]) as server:
        run = run_load(Load(Target.parse(server.url), "/", [b"{}"] * 30, None, arrivals))
    due_times = sorted(outcome.due_s - run.start_s for outcome in run.outcomes)
    assert due_times == pytest.approx(list(arrivals))
    assert all(outcome.start_s >= outcome.due_s - 0.002 for outcome in run.outcomes)


def test_random_prompts_are_seeded_and_share_their_prefix() -> None:
    spec = PromptSpec(num_prompts=5, input_len=20, shared_prefix_len=8, vocab_size=1000, seed=4)
    items = random_prompts(spec)
    assert items == random_prompts(spec)
    ids = [item.prompt for item in items]
    assert all(isinstance(p, list) and len(p) == 20 and p[:8] == ids[0][:8] for p in ids)  # type: ignore[index]
    assert len({tuple(p) for p in ids}) == 5  # type: ignore[arg-type]
    texts = [str(item.prompt).split() for item in random_prompts(PromptSpec(3, 40, 10, None, 0.5))]
    assert all(len(words) == 20 and words[:5] == texts[0][:5] for words in texts)


def test_invalid_workloads_are_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadWorkload, match="--shared-prefix-len is 30"):
        random_prompts(PromptSpec(1, 20, 30))
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(BadWorkload, match="No such file"):
        read_prompts(path, None)
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(BadWorkload, match=r"prompts.jsonl:2"):
        read_prompts(path, None)
    path.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 5}\n')
    assert len(read_prompts(path, None)) == 2
    items = read_prompts(path, 5)
    assert len(items) == 5 and items[1].output_len == 5
    with pytest.raises(BadWorkload, match="chat/completions"):
        RequestShape("/v1/completions", "m", 5).body(items[1])
    with pytest.raises(BadUrl, match="ftp"):
        Target.parse("ftp://x")


def test_bodies_follow_the_openai_api() -> None:
    shape = RequestShape("/v1/chat/completions", "m", 9, True, 0.0, {"top_k": msgspec.Raw(b"4")})
    body = json.loads(shape.body(Item("hello")))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 9,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 4,
    }


def test_target_headers_and_prefix() -> None:
    target = Target.parse("http://[::1]:81/base/v1/", "secret", {"X-A": "b"})
    request = target.request("POST", "/v1/completions", b"{}").decode()
    assert request.startswith("POST /base/v1/completions HTTP/1.1\r\nHost: [::1]:81\r\n")
    assert "Authorization: Bearer secret\r\n" in request and "X-A: b\r\n" in request
    assert request.endswith("Content-Length: 2\r\n\r\n{}")


def test_single_requests() -> None:
    with toy_server(lambda path, body, number: [sized("200 OK", path.encode())]) as server:
        assert ask(Target.parse(server.url), "GET", "/v1/models").body == b"/v1/models"


def test_gaps_count_simultaneous_events_as_zero() -> None:
    tally = StreamTally(
        read_times_s=array("d", [1.0, 1.5, 3.5]),
        read_events=array("L", [2, 1, 1]),
        num_events=4,
        first_s=1.0,
        last_s=3.5,
    )
    summary = summarise(Run(0.0, 4.0, [Outcome(0.0, 0.0, 3.5, tally)]))
    assert summary.inter_token_ms is not None
    assert (summary.inter_token_ms.count, summary.inter_token_ms.max) == (3, 2000.0)
    assert summary.inter_token_ms.p50 == 500.0
    assert not summary.has_usage and summary.output_tokens == 4


METRICS = """# TYPE vllm:spec_decode_num_drafts counter
quintet:spec_decode_num_drafts_total{engine="0"} 7
vllm:spec_decode_num_drafts_total{engine="0"} 7
vllm:spec_decode_num_drafts_total{engine="1"} 3.0
vllm:spec_decode_num_draft_tokens_total 40
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="10",engine="0"} 3.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
"""


def test_acceptance_is_the_difference_of_two_readings() -> None:
    before = Counter({"drafts": 2, "draft_tokens": 8, "accepted_tokens": 4, "0": 1})
    accepted = acceptance(before, counters_of(METRICS))
    assert accepted == Acceptance(8, 32, 8, 0.25, 2.0, [1.0, 0.375])
    assert acceptance_lines(accepted)[-1].endswith(": 100 38")
    assert acceptance(counters_of(METRICS), counters_of(METRICS)) is None
    assert acceptance_lines(None) == ["drafts       none was verified"]
