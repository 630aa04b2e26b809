"""The conversations API: stored items, and responses as turns."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from quintet.wire.chat import decode_messages
from quintet.wire.messages import Submit

ASK: Any = {"model": "toy", "max_output_tokens": 3}
HELLO: Any = {"type": "message", "role": "user", "content": "hello"}


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve()


@pytest.fixture
def client(server: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompted(server: Any) -> list[tuple[str, str]]:
    messages = decode_messages(server.engine.wait_for(Submit)[-1].prompt.messages)
    return [(message["role"], message["content"]) for message in messages]


def texts(client: OpenAI, conversation: str) -> list[tuple[str, str]]:
    items: list[Any] = list(
        client.conversations.items.list(conversation, order="asc", limit=2)
    )  # several pages
    return [(item.role, item.content[0].text) for item in items]


def test_conversations_and_items_are_created_read_and_deleted(client: OpenAI) -> None:
    made = client.conversations.create(items=[HELLO], metadata={"topic": "rain"})
    assert (made.id[:5], made.object, made.metadata) == ("conv_", "conversation", {"topic": "rain"})
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"topic": "snow"}).metadata == {"topic": "snow"}
    assert client.conversations.retrieve(made.id).metadata == {"topic": "snow"}

    more = client.conversations.items.create(
        made.id, items=[{"type": "message", "role": "user", "content": "and"}, HELLO]
    )
    assert [item.id for item in more.data] == [more.first_id, more.last_id]
    assert texts(client, made.id) == [("user", "hello"), ("user", "and"), ("user", "hello")]
    assert client.conversations.items.retrieve(more.first_id, conversation_id=made.id) == more.data[0]
    assert client.conversations.items.delete(more.first_id, conversation_id=made.id).id == made.id
    assert texts(client, made.id) == [("user", "hello"), ("user", "hello")]
    with pytest.raises(openai.NotFoundError, match="no item"):
        client.conversations.items.retrieve(more.first_id, conversation_id=made.id)

    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.conversations.retrieve(made.id)


@pytest.mark.parametrize("how", ["whole", "streamed", "background"])
def test_a_response_is_a_turn_of_its_conversation(how: str, server: Any, client: OpenAI) -> None:
    conversation = client.conversations.create(items=[HELLO]).id
    for turn in range(2):
        request = {
            **ASK,
            "conversation": conversation if turn else {"id": conversation},
            "input": f"turn {turn}",
        }
        if how == "streamed":
            *_, last = client.responses.create(**request, stream=True)
            response: Any = last.response
        else:
            response = client.responses.create(**request, background=how == "background")
        while response.status not in ("completed", "incomplete"):
            response = client.responses.retrieve(response.id)
        assert response.conversation.id == conversation
    answer = ("assistant", " t0 t1 t2")
    assert texts(client, conversation) == [
        ("user", "hello"),
        ("user", "turn 0"),
        answer,
        ("user", "turn 1"),
        answer,
    ]
    assert prompted(server) == [("user", "hello\nturn 0"), answer, ("user", "turn 1")]
    assert len(client.responses.input_items.list(response.id).data) == 4, (
        "input items are those at the time of the request"
    )
    client.responses.create(**ASK, previous_response_id=response.id, input="without it")
    assert prompted(server)[2:] == [("user", "turn 1"), answer, ("user", "without it")]
    assert len(texts(client, conversation)) == 5


@pytest.mark.parametrize("background", [False, True])
def test_storage_per_turn_is_constant(background: bool, serve: Callable[..., Any], tmp_path: Path) -> None:
    kept = tmp_path / "kept.sqlite"
    server, sizes = serve(response_store=str(kept)), list[int]()
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        conversation = client.conversations.create().id
        for _ in range(5):
            response = client.responses.create(
                **ASK, conversation=conversation, input="x" * 3000, background=background
            )
            while response.status not in ("completed", "incomplete"):
                response = client.responses.retrieve(response.id)
            with sqlite3.connect(kept) as file:
                sizes += file.execute("SELECT num_bytes FROM held").fetchone()
        assert len(client.responses.input_items.list(response.id).data) == 9
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(growth) < min(growth) + 100, growth


def test_a_response_of_a_conversation_cannot_be_continued_after_deletion(client: OpenAI) -> None:
    conversation = client.conversations.create(items=[HELLO]).id
    response = client.responses.create(**ASK, conversation=conversation, input="and")
    client.conversations.delete(conversation)
    (own,) = client.responses.input_items.list(response.id).data
    assert own.content[0].text == "and"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="no longer in it"):
        client.responses.create(**ASK, previous_response_id=response.id, input="x")


def test_a_failed_response_adds_no_items(server: Any, client: OpenAI) -> None:
    conversation = client.conversations.create(items=[HELLO]).id
    server.engine.fail_after = 1
    with pytest.raises(openai.InternalServerError):
        client.responses.create(**ASK, conversation=conversation, input="hear me")
    assert texts(client, conversation) == [("user", "hello")]


def test_missing_conversations_are_404(client: OpenAI, serve: Callable[..., Any]) -> None:
    conversation = client.conversations.create().id
    for call in (
        lambda: client.responses.create(**ASK, conversation="conv_1", input="x"),
        lambda: client.conversations.items.list("conv_1"),
        lambda: client.responses.retrieve(conversation),
    ):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            call()
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(**ASK, previous_response_id=conversation, input="x")
    image: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    with pytest.raises(openai.BadRequestError, match=r"items\[0\]"):
        client.conversations.create(items=[image])
    with (
        OpenAI(
            base_url=f"{serve(response_store_entries=0).url}/v1", api_key="none", max_retries=0
        ) as nothing_kept,
        pytest.raises(openai.BadRequestError, match="stores no"),
    ):
        nothing_kept.conversations.create()


def test_a_conversation_over_the_body_limit_is_refused(serve: Callable[..., Any]) -> None:
    server = serve(max_body_bytes=4096)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        conversation = client.conversations.create(items=[{**HELLO, "content": "x" * 3000}]).id
        with pytest.raises(openai.APIStatusError, match="Start a new one"):
            client.conversations.items.create(conversation, items=[{**HELLO, "content": "y" * 3000}])
        assert len(texts(client, conversation)) == 1
