"""Streams that a router passes on: what it is told beside them, and going on with one that began elsewhere."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest

from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import ParsersConfig
from quintet.wire.messages import Admit, Reclaimed, Submit

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
def test_who_asks_is_told_the_tokens_of_every_event(shared: Any, path: str, body: dict[str, Any]) -> None:
    asked = {**body, "max_tokens": 3, "n": 2, "stream": True, "seed": 5}
    plain, relayed = (shared.ask("POST", path, asked, headers) for headers in ({}, RELAY))
    assert re.fullmatch(r"5\.\d{10}", relayed.headers["x-quintet-relay"])
    assert "x-quintet-relay" not in plain.headers and b": ids" not in plain.body
    told = re.findall(rb"^: ids (\d) (\[.*\])$", relayed.body, re.M)
    assert sorted(told) == [
        (b"%d" % choice, b"[%d]" % (10 + token)) for choice in (0, 1) for token in range(3)
    ]
    assert len(relayed.events) == len(plain.events)


def going_on(position: str, outputs: list[list[int]], **fields: Any) -> dict[str, Any]:
    request = {"prompt": "x", "max_tokens": 6, "n": len(outputs), "stream": True}
    return {
        "path": C, "request": request, "position": position, "outputs": outputs, "seeds": [7], "created": 1_700_000_000, **fields,
    }  # fmt: skip


def test_a_stream_goes_on_behind_what_was_told(serve: Any) -> None:
    server = serve()
    server.engine.held = True
    server.engine.silent_after = 0
    outputs = [[10, 11, 12], [10, 11], []]
    body = json.dumps(going_on("2,2e,-", outputs)).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (S.encode(), len(body), body)
        )
        submits = server.engine.wait_for(Submit, 2)
    assert [(s.spec.choice, list(unpack_i32(s.spec.output_ids))) for s in submits] == [(0, [10, 11]), (2, [])]
    assert all(s.spec.params.seed == 7 and s.spec.params.n == 1 for s in submits)
    reply = server.ask("POST", S, going_on("3e", [[10, 11, 12]]))
    assert reply.status == 200 and reply.body == b"data: [DONE]\n\n", "only the end was missing"


def test_ids_go_on_behind_what_was_told(serve: Any) -> None:
    request = {"token_ids": [5], "sampling_params": {"max_tokens": 4}, "stream": True}
    reply = serve().ask("POST", S, {**going_on("2", [[10, 11]]), "path": G, "request": request})
    told = [event["choices"][0] for event in reply.events if isinstance(event, dict)]
    assert [token for choice in told for token in choice["token_ids"]] == [12, 13]
    assert told[-1]["finish_reason"] == "length"


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
def test_what_cannot_be_gone_on_with(shared: Any, change: dict[str, Any], words: str) -> None:
    reply = shared.ask("POST", S, {**going_on("1", [[10, 11]]), **change})
    assert reply.status == 400 and words in reply.json["error"]["message"]


def test_every_prompt_goes_on_with_its_own_seed(serve: Any) -> None:
    """Also with seeds that were drawn, and negative ones."""
    server = serve()
    prompts = {"prompt": ["x", "y"], "max_tokens": 2, "stream": True}
    told = server.ask("POST", C, prompts, RELAY).headers["x-quintet-relay"]
    begun = server.engine.wait_for(Submit, 2)
    drawn = [submit.spec.params.seed for submit in begun]
    assert told.partition(".")[0] == "{},{}".format(*drawn) and drawn[0] != drawn[1]
    going = {**going_on("0", [[], []]), "request": prompts, "seeds": [-5, 9]}
    assert server.ask("POST", S, going).status == 200
    assert [submit.spec.params.seed for submit in server.engine.wait_for(Submit, 4)[2:]] == [-5, 9]


def usage_of_the_rest(server: Any, going: dict[str, Any], **fields: Any) -> dict[str, Any]:
    going["request"] = {**going["request"], "stream_options": {"include_usage": True}, **fields}
    reply = server.ask("POST", S, going)
    assert reply.status == 200, reply.body
    (told,) = [event["usage"] for event in reply.events if isinstance(event, dict) and event.get("usage")]
    return dict(told)


def test_usage_counts_prompts_that_had_ended(serve: Any) -> None:
    server = serve()
    told = usage_of_the_rest(server, going_on("3e", [[10, 11, 12]]), prompt="four")
    assert (told["prompt_tokens"], told["completion_tokens"]) == (4, 3)
    going = {**going_on("1e,-,-", [[10], [], []]), "seeds": [1, 2, 3]}
    told = usage_of_the_rest(
        server, going, prompt=["three", "a b", "a"], n=1, max_tokens=2, truncate_prompt_tokens=3
    )
    assert (told["prompt_tokens"], told["completion_tokens"]) == (3 + 2 + 1, 1 + 2 + 2)


def test_usage_counts_the_reasoning_of_choices_that_had_ended(serve: Any) -> None:
    server = serve(parsers=ParsersConfig(reasoning="qwen3"))
    going = {**going_on("3e,2e", [[10, 11, 12], [10, 11]]), "path": H}
    going["request"] = {
        "messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True, "temperature": 1,
    }  # fmt: skip
    told = usage_of_the_rest(server, going)
    assert told["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert (told["prompt_tokens"], told["completion_tokens"]) == (3, 5)


def test_who_comes_back_is_told_the_reasoning_of_choices_that_had_ended(serve: Any) -> None:
    server = serve(parsers=ParsersConfig(reasoning="qwen3"))
    asked = {
        "messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True, "temperature": 1,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    begun = server.ask("POST", H, asked)
    (submit,) = server.engine.wait_for(Submit)
    outputs = [(0, pack_i32([10, 11, 12])), (1, pack_i32([10, 11]))]
    admit = Admit(submit.request_id, pack_i32([7, 8, 9]), submit.spec, 0)
    server.engine.kept = Reclaimed(0, admit, outputs)
    rest = server.ask("GET", f"{S}/{begun.headers['x-stream-id']}?from=3e,2e")
    (told,) = [event["usage"] for event in rest.events if isinstance(event, dict)]
    assert told["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert (told["prompt_tokens"], told["completion_tokens"]) == (3, 5)


def test_who_comes_back_and_asks_is_told_the_tokens_of_what_it_has(serve: Any) -> None:
    """So it can have another server go on, though it was not there when they were told."""
    server = serve()
    begun = server.ask("POST", C, {"prompt": "x", "max_tokens": 6, "n": 3, "stream": True, "seed": 5})
    (submit,) = server.engine.wait_for(Submit)
    outputs = [(0, pack_i32([10, 11, 12])), (1, pack_i32([10, 11])), (2, b"")]
    admit = Admit(submit.request_id, pack_i32([7]), submit.spec, 0)
    server.engine.kept = Reclaimed(0, admit, outputs)
    path = f"{S}/{begun.headers['x-stream-id']}?from=2,2e,-"
    told = server.ask("GET", path, None, RELAY).body
    assert told.startswith(b": told 0 [10,11]\n\n: told 1 [10,11]\n\n")
    assert b": told" not in server.ask("GET", path).body
