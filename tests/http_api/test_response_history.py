"""Stored responses: continued conversations, retrieval at any frontend, background responses, deletion."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from quintet.frontend.response_store import FILE
from quintet.wire.channels import Channel
from quintet.wire.chat import decode_messages
from quintet.wire.config import ParsersConfig
from quintet.wire.messages import Cancel, Resume, Submit, TokenizeQuery

R = "/v1/responses"
RAIN: Any = {"type": "function", "name": "rain", "parameters": {"type": "object"}, "strict": True}
CALLS = [
    [(Channel.REASONING, 0, "Rain?")],
    [(Channel.CONTENT, 0, "I look."), (Channel.NAME, 0, "rain"), (Channel.ARGUMENTS, 0, "{}")],
]


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve()


@pytest.fixture
def client(server: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompted(server: Any) -> Any:
    return decode_messages(server.engine.wait_for(Submit)[-1].prompt.messages)


def text_of(events: list[Any]) -> str:
    """Return the text of the events' deltas."""
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def wait_for_status(client: OpenAI, response_id: str, *statuses: str) -> Any:
    """Return a response once it has one of these statuses."""
    give_up_s = time.monotonic() + 10
    while True:
        response = client.responses.retrieve(response_id)
        if response.status in statuses:
            return response
        assert time.monotonic() < give_up_s, response
        time.sleep(0.01)


def wait_for_end(client: OpenAI, response_id: str) -> Any:
    """Return a response once it has ended."""
    return wait_for_status(client, response_id, "completed", "incomplete", "failed", "cancelled")


def test_input_tokens_are_counted_with_the_earlier_conversation(client: OpenAI, server: Any) -> None:
    first = client.responses.create(model="toy", input="hello", max_output_tokens=1)
    counted = client.responses.input_tokens.count(
        model="toy",
        input="and",
        instructions="Be brief.",
        previous_response_id=first.id,
        tools=[RAIN],
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
        truncation="auto",
    )
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 3)
    prompt = server.engine.wait_for(TokenizeQuery)[-1].prompt
    roles = [message["role"] for message in decode_messages(prompt.messages)]
    assert roles == ["system", "user", "assistant", "user"] and b"rain" in prompt.tools
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        client.responses.input_tokens.count(model="toy")
    assert len(server.engine.wait_for(Submit)) == 1


def test_a_conversation_continues_at_any_frontend(serve: Callable[..., Any], client: OpenAI) -> None:
    first = client.responses.create(model="toy", input="one", instructions="Be kind.")
    second = client.responses.create(model="toy", input="two", previous_response_id=first.id)
    other = serve()  # in the same run folder
    with OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as elsewhere:
        assert elsewhere.responses.retrieve(first.id) == client.responses.retrieve(first.id)
        with elsewhere.responses.stream(model="toy", input="three", previous_response_id=second.id) as stream:
            last = stream.until_done() and stream._state
        assert last is not None
        answer = first.output_text
        assert prompted(other) == [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "three"},
        ]
        elsewhere.responses.delete(first.id)
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    with pytest.raises(openai.BadRequestError, match="no longer stored"):
        client.responses.create(model="toy", input="four", previous_response_id=second.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(first.id)


def test_a_tool_loop_sends_only_the_results(serve: Callable[..., Any]) -> None:
    server = serve(parsers=ParsersConfig(reasoning="qwen3", tools="hermes"))
    server.engine.script = CALLS
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="toy", input="rain?", tools=[RAIN])
        reasoning, message, call = first.output
        assert reasoning.type == "reasoning" and message.type == "message" and call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "no"}
        second = client.responses.create(
            model="toy", input=[result], tools=[RAIN], previous_response_id=first.id
        )
        user, assistant, tool = prompted(server)
        assert user["content"] == "rain?" and assistant["reasoning_content"] == "Rain?"
        assert assistant["content"] == "I look." and assistant["tool_calls"][0]["id"] == call.call_id
        assert tool == {"role": "tool", "name": "rain", "tool_call_id": call.call_id, "content": "no"}
        reference: Any = {"type": "item_reference", "id": message.id}
        client.responses.create(model="toy", input=[reference, {"role": "user", "content": "and?"}])
        assert [each["content"] for each in prompted(server)] == ["I look.", "and?"]
        items = client.responses.input_items.list(second.id, order="asc", limit=2)
        listed = [item.to_dict() for item in items]
    assert [item["type"] for item in listed] == [
        "message", "reasoning", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert listed[0]["content"] == [{"type": "input_text", "text": "rain?"}]
    assert listed[2]["id"] == message.id and listed[4]["output"] == "no"
    assert len({item["id"] for item in listed}) == 5


def test_streams_are_stored_when_they_end(client: OpenAI, server: Any) -> None:
    events = list(client.responses.create(model="toy", input="x", stream=True, max_output_tokens=3))
    first, last = events[0], events[-1]
    assert first.type == "response.created" and last.type == "response.incomplete"
    kept = client.responses.retrieve(first.response.id)
    assert kept == last.response
    replayed = list(client.responses.retrieve(kept.id, stream=True))
    assert [event.sequence_number for event in replayed] == list(range(len(replayed)))
    assert [event.type for event in replayed if ".delta" not in event.type] == [
        event.type for event in events if ".delta" not in event.type
    ]
    assert (
        "".join(event.delta for event in replayed if event.type == "response.output_text.delta")
        == " t0 t1 t2"
    )
    assert replayed[-1].type == last.type and replayed[-1].response == kept
    assert server.ask("POST", f"{R}/{kept.id}/cancel", b"").status == 400


def test_responses_are_not_stored_if_disabled(
    client: OpenAI, serve: Callable[..., Any], tmp_path: Any
) -> None:
    response = client.responses.create(model="toy", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    assert client.responses.create(model="toy", input="x").id
    none = serve(response_store_entries=0)
    reply = none.ask("POST", R, {"input": "x"})
    assert reply.json["store"] is False
    assert none.ask("GET", f"{R}/{reply.json['id']}").status == 404
    assert "stores none" in none.ask("POST", R, {"input": "x", "background": True}).json["error"]["message"]
    assert none.ask("POST", R, {"input": "x", "previous_response_id": "resp_1"}).status == 400


def test_failed_responses_are_not_stored_and_cancelled_ones_are(
    serve: Callable[..., Any], tmp_path: Any
) -> None:
    server = serve()
    server.engine.fail_after = 0
    assert server.ask("POST", R, {"input": "x"}).status == 500
    server.engine.fail_after, server.engine.silent_after = None, 2
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.create(model="toy", input="x", stream=True) as stream:
            first = next(stream)
        server.engine.wait_for(Cancel)
        assert first.type == "response.created"
        while (left := client.responses.retrieve(first.response.id)).status == "in_progress":
            time.sleep(0.01)
        assert left.status == "cancelled"
    with sqlite3.connect(tmp_path / FILE) as file:
        assert file.execute("SELECT COUNT(*) FROM responses").fetchall() == [(1,)]
    file.close()


def test_a_background_response_is_polled_or_streamed(client: OpenAI) -> None:
    response = client.responses.create(model="toy", input="x", background=True, max_output_tokens=5)
    assert response.status == "queued" and response.background and response.output == []
    last = wait_for_end(client, response.id)
    assert last.status == "incomplete" and last.output_text == " t0 t1 t2 t3 t4"
    assert client.responses.cancel(response.id) == last
    stream = client.responses.create(
        model="toy", input="x", background=True, stream=True, max_output_tokens=5
    )
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    kept = events[0].response.id
    for after in (0, 4, len(events) - 2):
        rest = list(client.responses.retrieve(kept, stream=True, starting_after=after))
        assert rest == events[after + 1 :]
    assert list(client.responses.retrieve(kept, stream=True)) == events


def test_a_started_background_response_is_in_progress(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.held, server.engine.silent_after = True, 2
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        made = client.responses.create(model="toy", input="x", background=True)
        assert client.responses.retrieve(made.id).status == "queued"
        server.call(server.engine.release)
        started = wait_for_status(client, made.id, "in_progress")
        assert started.output == [] and started.completed_at is None
        assert client.responses.cancel(made.id).status == "cancelled"


def test_a_background_response_can_be_cancelled_or_deleted(serve: Callable[..., Any]) -> None:
    server = serve()
    server.engine.silent_after = 2
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(model="toy", input="x", background=True)
        cancelled = client.responses.cancel(response.id)
        assert cancelled.status == "cancelled" and wait_for_end(client, response.id) == cancelled
        assert server.engine.wait_for(Cancel)
        response = client.responses.create(model="toy", input="x", background=True)
        client.responses.delete(response.id)
        assert server.engine.wait_for(Cancel, 2)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel(response.id)
        server.engine.silent_after, server.engine.fail_after = None, 2
        failed = wait_for_end(client, client.responses.create(model="toy", input="x", background=True).id)
        assert failed.status == "failed" and failed.error is not None and "broke" in failed.error.message


def test_another_server_resumes_background_responses(
    serve: Callable[..., Any], topology: Callable[..., Any], tmp_path: Any
) -> None:
    """After a server is lost, another one recomputes its background responses with the same seed."""
    path = str(tmp_path / "kept.sqlite")
    before = serve(run_dir=str(tmp_path / "before"), response_store=path)
    before.engine.silent_after = 2
    ask: Any = {"model": "toy", "input": "x", "background": True, "max_output_tokens": 4}
    ask["extra_headers"] = {"X-Session-Id": "s"}
    with OpenAI(base_url=f"{before.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.create(**ask, stream=True) as stream:
            first: list[Any] = []
            while text_of(first) != " t0 t1":
                first.append(next(stream))
        silent = client.responses.create(**ask)
    after = serve(run_dir=str(tmp_path / "after"), response_store=path)
    after.call(after.service.handle, topology(2))
    with OpenAI(base_url=f"{after.url}/v1", api_key="none", max_retries=0) as client:
        last = wait_for_end(client, first[0].response.id)
        after_seen = first[-1].sequence_number
        rest: list[Any] = list(client.responses.retrieve(last.id, stream=True, starting_after=after_seen))
        assert wait_for_end(client, silent.id).output_text == last.output_text == " t0 t1 t2 t3"
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert text_of(events) == last.output_text
    assert rest[-1].response == last
    assert len(after.engine.wait_for(Resume, 2)) == 2
    submits = [server.engine.wait_for(Submit, 2) for server in (before, after)]
    seeds = [{submit.spec.params.seed for submit in each} for each in submits]
    assert seeds[0] == seeds[1] and len(seeds[0]) == 2
    assert {submit.session for each in submits for submit in each} == {"s"}


@pytest.mark.parametrize(
    ("change", "words"), [("num_owners = 6", "6 processes"), ("request = x''", "before it started")]
)
def test_a_background_response_that_cannot_be_resumed_fails(
    serve: Callable[..., Any], topology: Callable[..., Any], tmp_path: Any, change: str, words: str
) -> None:
    path = str(tmp_path / "kept.sqlite")
    before = serve(run_dir=str(tmp_path / "before"), response_store=path)
    before.engine.silent_after = 2
    with OpenAI(base_url=f"{before.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(model="toy", input="x", background=True)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute(f"UPDATE responses SET {change}")
    after = serve(run_dir=str(tmp_path / "after"), response_store=path)
    after.call(after.service.handle, topology(2))
    with OpenAI(base_url=f"{after.url}/v1", api_key="none", max_retries=0) as client:
        lost = wait_for_end(client, response.id)
    assert lost.status == "failed" and lost.error is not None and words in lost.error.message


def test_input_items_are_paginated(client: OpenAI, server: Any) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    response = client.responses.create(model="toy", input=items)
    path = f"{R}/{response.id}/input_items"
    page = server.ask("GET", f"{path}?limit=2").json
    assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"] and page["has_more"]
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][1]["id"])
    rest = server.ask("GET", f"{path}?after={page['last_id']}").json
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"] and not rest["has_more"]
    for query in ("limit=0", "limit=x", "order=up", "after=absent"):
        assert server.ask("GET", f"{path}?{query}").status == 400
    assert server.ask("GET", f"{R}/{response.id}?stream=true&starting_after=-1").status == 400


def test_an_unusable_store_is_an_error(serve: Callable[..., Any], tmp_path: Any) -> None:
    server = serve(response_store=str(tmp_path / "nowhere" / "kept.sqlite"))
    reply = server.ask("POST", R, {"input": "x"})
    assert reply.status == 503 and "store: false" in reply.json["error"]["message"]
    assert server.ask("POST", R, {"input": "x", "store": False}).status == 200
    newer = tmp_path / "newer.sqlite"
    with contextlib.closing(sqlite3.connect(newer)) as file:
        file.execute("PRAGMA user_version = 99")
    reply = serve(response_store=str(newer)).ask("POST", R, {"input": "x"})
    assert reply.status == 503 and "another version" in reply.json["error"]["message"]
