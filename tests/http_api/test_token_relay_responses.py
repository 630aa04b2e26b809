"""Streams of the Responses dialect that another server goes on with: every event behind the client's last, and what is kept."""

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
from quintet.wire.messages import Admit, Reclaimed, Submit

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
    """Start a server that keeps responses of its own."""

    def start(name: str) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        server = serve(run_dir=str(folder), parsers=ParsersConfig(reasoning="qwen3", tools="hermes"))
        server.engine.script = SCRIPT
        return server

    return start


def ticket_of(reply: Any) -> tuple[int, int, str]:
    """Return seed, time and name, as whoever passes a stream on is told them."""
    match = re.fullmatch(r"(-?\d+)\.(\d+)\.(resp_[0-9a-f]{48})", reply.headers["x-quintet-relay"])
    assert match is not None, reply.headers
    return int(match[1]), int(match[2]), match[3]


def ids_told(reply: Any) -> list[int]:
    """Return the tokens that comments tell."""
    told = re.findall(rb"^: ids 0 (\[.*\])$", reply.body, re.M)
    return [token for ids in told for token in json.loads(ids)]


def events_of(reply: Any) -> list[Any]:
    """Return the events without when the answer ended."""
    found = reply.events
    for event in found:
        event.get("response", {}).pop("completed_at", None)
    return found


def going_on(reply: Any, position: str, **fields: Any) -> dict[str, Any]:
    seed, created, name = ticket_of(reply)
    count = int(position.partition(".")[0].removesuffix("e"))
    outputs = [list(range(10, 10 + count))]
    return {
        "path": R, "request": REQUEST, "position": position, "outputs": outputs, "seeds": [seed], "created": created,
        "name": name, **fields,
    }  # fmt: skip


def test_it_goes_on_behind_any_event(server: Callable[[str], Any]) -> None:
    first, second = server("first"), server("second")
    begun = first.ask("POST", R, REQUEST, RELAY)
    events, tokens = events_of(begun), ids_told(begun)
    assert tokens == list(range(10, 17))
    assert b": ids" not in first.ask("POST", R, REQUEST).body
    positions = [event_id.partition(":")[2] for event_id in begun.event_ids]
    assert len(positions) == len(events) > 25
    for number, position in enumerate(positions, 1):
        reply = second.ask("POST", S, going_on(begun, position), RELAY)
        assert reply.status == 200 and events_of(reply) == events[number:], position
        count = int(position.partition(".")[0].removesuffix("e"))
        submit = second.engine.wait_for(Submit, number)[-1]
        assert list(unpack_i32(submit.spec.output_ids)) == tokens[:count] and submit.spec.replays == (
            count > 0
        )
        assert submit.spec.params.seed == ticket_of(begun)[0]
        assert ids_told(reply) == tokens[count:] and ticket_of(reply) == ticket_of(begun)


def test_who_finishes_a_response_keeps_it(server: Callable[[str], Any]) -> None:
    """And goes on with the conversation; a server that never heard of it says so."""
    first, second, third = map(server, ("first", "second", "third"))
    begun = first.ask("POST", R, REQUEST, RELAY)
    name = ticket_of(begun)[2]
    second.ask("POST", S, going_on(begun, begun.event_ids[9].partition(":")[2]))
    assert second.ask("GET", f"{R}/{name}").json["output"] == begun.events[-1]["response"]["output"]
    items = second.ask("GET", f"{R}/{name}/input_items").json["data"]
    assert [item["content"][0]["text"] for item in items] == ["rain?"]
    follows = {"model": "toy", "input": "And now?", "previous_response_id": name}
    assert second.ask("POST", R, follows).status == 200
    refused = third.ask("POST", R, follows)
    assert refused.status == 400 and refused.json["error"]["param"] == "previous_response_id"
    unkept = {**going_on(begun, "0.2+0+2"), "request": {**REQUEST, "store": False}}
    assert third.ask("POST", S, unkept).events[-1]["response"]["store"] is False
    assert third.ask("GET", f"{R}/{name}").status == 404


def test_a_server_that_is_back_with_its_file_goes_on_with_what_it_kept(server: Callable[[str], Any]) -> None:
    lost = server("lost")
    begun = lost.ask("POST", R, REQUEST, RELAY)
    name, path = ticket_of(begun)[2], f"{R}/{ticket_of(begun)[2]}"
    lost.engine.fail_after = 0
    assert lost.ask("POST", S, going_on(begun, "2.8+5+0")).status == 500
    assert lost.ask("GET", path).json["id"] == name, "what it had is not forgotten"
    lost.engine.fail_after = None
    assert lost.ask("POST", S, going_on(begun, "2.8+5+0")).status == 200
    assert lost.ask("GET", path).json["output"] == begun.events[-1]["response"]["output"]


def test_who_comes_back_is_told_the_tokens_of_what_it_has_once(server: Callable[[str], Any]) -> None:
    first = server("first")
    begun = first.ask("POST", R, REQUEST, RELAY)
    (submit,) = first.engine.wait_for(Submit)
    admit = Admit(submit.request_id, pack_i32([7, 8]), submit.spec, 0)
    first.engine.kept = Reclaimed(0, admit, [(0, pack_i32(range(10, 17)))])
    path = f"{S}/{begun.event_ids[9].replace(':', '?from=')}"
    rest = first.ask("GET", path, None, RELAY)
    assert rest.body.startswith(b": told 0 [10,11,12]\n\n") and ids_told(rest) == [13, 14, 15, 16]
    assert ticket_of(rest) == ticket_of(begun) and events_of(rest) == events_of(begun)[10:]


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
def test_what_cannot_be_gone_on_with(server: Callable[[str], Any], change: Any, words: str) -> None:
    one = server("one")
    begun = one.ask("POST", R, REQUEST, RELAY)
    reply = one.ask("POST", S, {**going_on(begun, "2.8+5+0"), **change})
    assert reply.status == 400 and words in reply.json["error"]["message"]


def test_with_log_probabilities_nobody_is_told_how_to_go_on(server: Callable[[str], Any]) -> None:
    """The last event has those of every token, and they are not kept."""
    reply = server("one").ask("POST", R, {**REQUEST, "top_logprobs": 1}, RELAY)
    assert reply.status == 200
    assert "x-quintet-relay" not in reply.headers and b": ids" not in reply.body


def test_a_server_that_ends_says_that_another_can_go_on(server: Callable[[str], Any]) -> None:
    """To whoever can have that: an event of this dialect has no status."""
    one = server("one")
    one.engine.fail_after = 3
    one.engine.fails_with = ErrorCode.UNAVAILABLE
    for headers, is_told in ((RELAY, True), ({}, False)):
        body = one.ask("POST", R, REQUEST, headers).body
        assert (b"\n: withdrawn\nevent: response.failed\n" in body) == is_told
        assert body.count(b": withdrawn") == is_told
