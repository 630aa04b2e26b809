"""Streams through a router: token ids in comments, and resumption of streams of other servers."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest

from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import ParsersConfig
from quintet.wire.messages import Admit, Resumed, Submit

C, H, G, S = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/v1/streams"
RELAY = {"X-Quintet-Relay": "1"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (C, {"prompt": "x"}),
        (H, {"messages": [{"role": "user", "content": "x"}]}),
        (G, {"token_ids": [5], "sampling_params": {"max_tokens": 3, "n": 2, "seed": 5}}),
    ],
)
def test_the_relay_header_adds_token_ids_to_every_event(shared: Any, path: str, body: dict[str, Any]) -> None:
    request = {**body, "max_tokens": 3, "n": 2, "stream": True, "seed": 5}
    plain, relayed = (shared.ask("POST", path, request, headers) for headers in ({}, RELAY))
    assert re.fullmatch(r"5\.\d{10}", relayed.headers["x-quintet-relay"])
    assert "x-quintet-relay" not in plain.headers and b": ids" not in plain.body
    comments = re.findall(rb"^: ids (\d) (\[.*\])$", relayed.body, re.M)
    assert sorted(comments) == [
        (b"%d" % choice, b"[%d]" % (10 + token)) for choice in (0, 1) for token in range(3)
    ]
    assert len(relayed.events) == len(plain.events)


def resume_body(position: str, outputs: list[list[int]], **fields: Any) -> dict[str, Any]:
    request = {"prompt": "x", "max_tokens": 6, "n": len(outputs), "stream": True}
    return {
        "path": C, "request": request, "position": position, "outputs": outputs, "seeds": [7], "created": 1_700_000_000, **fields,
    }  # fmt: skip


def test_a_stream_resumes_after_the_given_outputs(serve: Any) -> None:
    server = serve()
    server.engine.held = True
    server.engine.silent_after = 0
    outputs = [[10, 11, 12], [10, 11], []]
    body = json.dumps(resume_body("2,2e,-", outputs)).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (S.encode(), len(body), body)
        )
        submits = server.engine.wait_for(Submit, 2)
    assert [(s.spec.choice, list(unpack_i32(s.spec.output_ids))) for s in submits] == [(0, [10, 11]), (2, [])]
    assert all(s.spec.params.seed == 7 and s.spec.params.n == 1 for s in submits)
    reply = server.ask("POST", S, resume_body("3e", [[10, 11, 12]]))
    assert reply.status == 200 and reply.body == b"data: [DONE]\n\n", "only the end was missing"


def test_token_ids_resume_after_the_given_outputs(serve: Any) -> None:
    request = {"token_ids": [5], "sampling_params": {"max_tokens": 4}, "stream": True}
    reply = serve().ask("POST", S, {**resume_body("2", [[10, 11]]), "path": G, "request": request})
    choices = [event["choices"][0] for event in reply.events if isinstance(event, dict)]
    assert [token for choice in choices for token in choice["token_ids"]] == [12, 13]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"path": "/v1/embeddings"},
            "of /v1/completions, /v1/chat/completions, /v1/messages, /inference/v1/generate, /v1/responses can",
        ),
        ({"position": "3"}, "2 tokens of choice 0, but the position counts 3"),
        ({"position": "1,1"}, "The position is"),
        ({"outputs": [[1], [2]]}, "outputs has 2 lists for 1 choices"),
        ({"outputs": [[10**9]]}, "outputs"),
        ({"seeds": [1 << 63]}, "X-Quintet-Relay"),
        ({"seeds": [7, 8]}, "seeds has 2 numbers for 1 prompts"),
        ({"request": {"prompt": "x"}}, "only streams can be continued"),
        ({"request": {"prompt": "x", "stream": True, "use_beam_search": True}}, "beam search"),
        ({"request": {"prompt": 5, "stream": True}}, "prompt"),
    ],
)
def test_streams_that_cannot_be_resumed_are_refused(shared: Any, change: dict[str, Any], words: str) -> None:
    reply = shared.ask("POST", S, {**resume_body("1", [[10, 11]]), **change})
    assert reply.status == 400 and words in reply.json["error"]["message"]


def test_every_prompt_resumes_with_its_seed(serve: Any) -> None:
    """Seeds may be drawn by the server or negative."""
    server = serve()
    prompts = {"prompt": ["x", "y"], "max_tokens": 2, "stream": True}
    ticket = server.ask("POST", C, prompts, RELAY).headers["x-quintet-relay"]
    first = server.engine.wait_for(Submit, 2)
    drawn_seeds = [submit.spec.params.seed for submit in first]
    assert ticket.partition(".")[0] == "{},{}".format(*drawn_seeds) and drawn_seeds[0] != drawn_seeds[1]
    body_sent = {**resume_body("0", [[], []]), "request": prompts, "seeds": [-5, 9]}
    assert server.ask("POST", S, body_sent).status == 200
    assert [submit.spec.params.seed for submit in server.engine.wait_for(Submit, 4)[2:]] == [-5, 9]


def usage_of_resumed(server: Any, body_sent: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body_sent["request"] = {**body_sent["request"], "stream_options": {"include_usage": True}, **fields}
    reply = server.ask("POST", S, body_sent)
    assert reply.status == 200, reply.body
    (usage,) = [event["usage"] for event in reply.events if isinstance(event, dict) and event.get("usage")]
    return dict(usage)


def test_usage_counts_finished_prompts(serve: Any) -> None:
    server = serve()
    usage = usage_of_resumed(server, resume_body("3e", [[10, 11, 12]]), prompt="four")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 3)
    body_sent = {**resume_body("1e,-,-", [[10], [], []]), "seeds": [1, 2, 3]}
    usage = usage_of_resumed(
        server, body_sent, prompt=["three", "a b", "a"], n=1, max_tokens=2, truncate_prompt_tokens=3
    )
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 + 2 + 1, 1 + 2 + 2)


def test_usage_counts_the_reasoning_of_finished_choices(serve: Any) -> None:
    server = serve(parsers=ParsersConfig(reasoning="qwen3"))
    body_sent = {**resume_body("3e,2e", [[10, 11, 12], [10, 11]]), "path": H}
    body_sent["request"] = {
        "messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True, "temperature": 1,
    }  # fmt: skip
    usage = usage_of_resumed(server, body_sent)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 5)


def test_a_reconnecting_client_gets_the_reasoning_count_of_finished_choices(serve: Any) -> None:
    server = serve(parsers=ParsersConfig(reasoning="qwen3"))
    request = {
        "messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True, "temperature": 1,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    first = server.ask("POST", H, request)
    (submit,) = server.engine.wait_for(Submit)
    outputs = [(0, pack_i32([10, 11, 12])), (1, pack_i32([10, 11]))]
    admit = Admit(submit.request_id, pack_i32([7, 8, 9]), submit.spec, 0)
    server.engine.resumed = Resumed(0, admit, outputs)
    rest = server.ask("GET", f"{S}/{first.headers['x-stream-id']}?from=3e,2e")
    (usage,) = [event["usage"] for event in rest.events if isinstance(event, dict)]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 5)


def test_a_reconnecting_relay_gets_the_token_ids_of_received_output(serve: Any) -> None:
    """Another server can then resume the stream, even for a relay that missed the first comments."""
    server = serve()
    first = server.ask("POST", C, {"prompt": "x", "max_tokens": 6, "n": 3, "stream": True, "seed": 5})
    (submit,) = server.engine.wait_for(Submit)
    outputs = [(0, pack_i32([10, 11, 12])), (1, pack_i32([10, 11])), (2, b"")]
    admit = Admit(submit.request_id, pack_i32([7]), submit.spec, 0)
    server.engine.resumed = Resumed(0, admit, outputs)
    path = f"{S}/{first.headers['x-stream-id']}?from=2,2e,-"
    replayed = server.ask("GET", path, None, RELAY).body
    assert replayed.startswith(b": told 0 [10,11]\n\n: told 1 [10,11]\n\n")
    assert b": told" not in server.ask("GET", path).body
