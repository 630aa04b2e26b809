"""Responses streams that another server resumes: all events after the client's last, and storage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quintet.wire.channels import Channel
from quintet.wire.codec import pack_i32, unpack_i32
from quintet.wire.config import ParsersConfig
from quintet.wire.errors import ErrorCode
from quintet.wire.messages import Admit, Resumed, Submit

R, S = "/v1/responses", "/v1/streams"
RELAY = {"X-Quintet-Relay": "1"}
SCRIPT = [
    [(Channel.REASONING, 0, "Ra")],
    [(Channel.REASONING, 0, "in?")],
    [(Channel.CONTENT, 0, "I look."), (Channel.NAME, 0, "rain"), (Channel.ARGUMENTS, 0, '{"in"')],
    [],
    [(Channel.ARGUMENTS, 0, ': "Oslo"}')],
    [(Channel.CONTENT, 0, "So")],
    [(Channel.CONTENT, 0, ".")],
]
RAIN = {"type": "function", "name": "rain", "parameters": {"type": "object"}}
REQUEST: dict[str, Any] = {"model": "toy", "input": "rain?", "tools": [RAIN], "stream": True}


@pytest.fixture
def server(serve: Callable[..., Any], tmp_path: Path) -> Callable[[str], Any]:
    """Start servers, each with its own response store."""

    def start(name: str) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        server = serve(run_dir=str(folder), parsers=ParsersConfig(reasoning="qwen3", tools="hermes"))
        server.engine.script = SCRIPT
        return server

    return start


def ticket_of(reply: Any) -> tuple[int, int, str]:
    """Return seed, time and response id of the relay header."""
    match = re.fullmatch(r"(-?\d+)\.(\d+)\.(resp_[0-9a-f]{48})", reply.headers["x-quintet-relay"])
    assert match is not None, reply.headers
    return int(match[1]), int(match[2]), match[3]


def ids_in_comments(reply: Any) -> list[int]:
    """Return the token ids of the comments."""
    comments = re.findall(rb"^: ids 0 (\[.*\])$", reply.body, re.M)
    return [token for ids in comments for token in json.loads(ids)]


def events_of(reply: Any) -> list[Any]:
    """Return the events without end times."""
    found = reply.events
    for event in found:
        event.get("response", {}).pop("completed_at", None)
    return found


def resume_body(reply: Any, position: str, **fields: Any) -> dict[str, Any]:
    seed, created, name = ticket_of(reply)
    count = int(position.partition(".")[0].removesuffix("e"))
    outputs = [list(range(10, 10 + count))]
    return {
        "path": R, "request": REQUEST, "position": position, "outputs": outputs, "seeds": [seed], "created": created,
        "name": name, **fields,
    }  # fmt: skip


def test_a_response_resumes_after_any_event(server: Callable[[str], Any]) -> None:
    first, second = server("first"), server("second")
    first_reply = first.ask("POST", R, REQUEST, RELAY)
    events, tokens = events_of(first_reply), ids_in_comments(first_reply)
    assert tokens == list(range(10, 17))
    assert b": ids" not in first.ask("POST", R, REQUEST).body
    positions = [event_id.partition(":")[2] for event_id in first_reply.event_ids]
    assert len(positions) == len(events) > 25
    for number, position in enumerate(positions, 1):
        reply = second.ask("POST", S, resume_body(first_reply, position), RELAY)
        assert reply.status == 200 and events_of(reply) == events[number:], position
        count = int(position.partition(".")[0].removesuffix("e"))
        submit = second.engine.wait_for(Submit, number)[-1]
        assert list(unpack_i32(submit.spec.output_ids)) == tokens[:count] and submit.spec.replays == (
            count > 0
        )
        assert submit.spec.params.seed == ticket_of(first_reply)[0]
        assert ids_in_comments(reply) == tokens[count:] and ticket_of(reply) == ticket_of(first_reply)


def test_the_server_that_finishes_a_response_stores_it(server: Callable[[str], Any]) -> None:
    """That server continues the conversation; a server without the response refuses."""
    first, second, third = map(server, ("first", "second", "third"))
    first_reply = first.ask("POST", R, REQUEST, RELAY)
    name = ticket_of(first_reply)[2]
    second.ask("POST", S, resume_body(first_reply, first_reply.event_ids[9].partition(":")[2]))
    assert second.ask("GET", f"{R}/{name}").json["output"] == first_reply.events[-1]["response"]["output"]
    items = second.ask("GET", f"{R}/{name}/input_items").json["data"]
    assert [item["content"][0]["text"] for item in items] == ["rain?"]
    follows = {"model": "toy", "input": "And now?", "previous_response_id": name}
    assert second.ask("POST", R, follows).status == 200
    refused = third.ask("POST", R, follows)
    assert refused.status == 400 and refused.json["error"]["param"] == "previous_response_id"
    unkept = {**resume_body(first_reply, "0.2+0+2"), "request": {**REQUEST, "store": False}}
    assert third.ask("POST", S, unkept).events[-1]["response"]["store"] is False
    assert third.ask("GET", f"{R}/{name}").status == 404


def test_a_restarted_server_resumes_its_stored_response(server: Callable[[str], Any]) -> None:
    lost = server("lost")
    first_reply = lost.ask("POST", R, REQUEST, RELAY)
    name, path = ticket_of(first_reply)[2], f"{R}/{ticket_of(first_reply)[2]}"
    lost.engine.fail_after = 0
    assert lost.ask("POST", S, resume_body(first_reply, "2.8+5+0")).status == 500
    assert lost.ask("GET", path).json["id"] == name, "the stored response is kept"
    lost.engine.fail_after = None
    assert lost.ask("POST", S, resume_body(first_reply, "2.8+5+0")).status == 200
    assert lost.ask("GET", path).json["output"] == first_reply.events[-1]["response"]["output"]


def test_a_reconnecting_relay_gets_the_received_token_ids_once(server: Callable[[str], Any]) -> None:
    first = server("first")
    first_reply = first.ask("POST", R, REQUEST, RELAY)
    (submit,) = first.engine.wait_for(Submit)
    admit = Admit(submit.request_id, pack_i32([7, 8]), submit.spec, 0)
    first.engine.resumed = Resumed(0, admit, [(0, pack_i32(range(10, 17)))])
    path = f"{S}/{first_reply.event_ids[9].replace(':', '?from=')}"
    rest = first.ask("GET", path, None, RELAY)
    assert rest.body.startswith(b": told 0 [10,11,12]\n\n") and ids_in_comments(rest) == [13, 14, 15, 16]
    assert ticket_of(rest) == ticket_of(first_reply) and events_of(rest) == events_of(first_reply)[10:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "resp_1"}, "name is 'resp_1'; it must be the response id"),
        ({"name": ""}, "X-Quintet-Relay"),
        ({"request": {**REQUEST, "background": True}}, "a background response"),
        ({"request": {**REQUEST, "top_logprobs": 1}}, "log-probabilities"),
        ({"request": {**REQUEST, "previous_response_id": "resp_1"}}, "not stored"),
    ],
)
def test_responses_that_cannot_be_resumed_are_refused(
    server: Callable[[str], Any], change: Any, words: str
) -> None:
    one = server("one")
    first_reply = one.ask("POST", R, REQUEST, RELAY)
    reply = one.ask("POST", S, {**resume_body(first_reply, "2.8+5+0"), **change})
    assert reply.status == 400 and words in reply.json["error"]["message"]


def test_responses_with_logprobs_have_no_relay_header(server: Callable[[str], Any]) -> None:
    """The last event has the logprobs of every token, and they are not stored."""
    reply = server("one").ask("POST", R, {**REQUEST, "top_logprobs": 1}, RELAY)
    assert reply.status == 200
    assert "x-quintet-relay" not in reply.headers and b": ids" not in reply.body


def test_a_server_that_shuts_down_marks_its_streams_resumable(server: Callable[[str], Any]) -> None:
    """A comment marks it for relays only: events of this dialect have no status."""
    one = server("one")
    one.engine.fail_after = 3
    one.engine.fails_with = ErrorCode.UNAVAILABLE
    for headers, has_comment in ((RELAY, True), ({}, False)):
        body = one.ask("POST", R, REQUEST, headers).body
        assert (b"\n: withdrawn\nevent: response.failed\n" in body) == has_comment
        assert body.count(b": withdrawn") == has_comment
