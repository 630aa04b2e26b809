"""Bodies with many small parts: translated in linear time, because the event loop serves all clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from quintet.frontend.api.anthropic import turns as anthropic
from quintet.frontend.api.anthropic.types import ContentBlock, Turn
from quintet.frontend.api.openai.offered_tools import SentTool, offered_tools
from quintet.frontend.api.responses import items
from quintet.frontend.api.responses.types import InputItem
from quintet.wire.errors import ErrorCode, RequestError

NUM_PARTS = 20_000
TEXT = "x" * 200


def turns() -> list[dict[str, Any]]:
    messages, _ = anthropic.messages_of(None, [Turn(role="user", content=TEXT)] * NUM_PARTS)
    return messages


def messages_of_items() -> list[dict[str, Any]]:
    messages, _ = items.messages_of(None, [InputItem(role="user", content=TEXT)] * NUM_PARTS)
    return messages


def leading_tools() -> list[dict[str, Any]]:
    given = [InputItem(type="additional_tools")] * NUM_PARTS + [InputItem(role="user", content=TEXT)]
    messages, _ = items.messages_of(None, given)
    assert messages[0]["content"] == TEXT
    return messages


@pytest.mark.parametrize("translate", [turns, messages_of_items, leading_tools])
def test_many_parts_take_linear_time(translate: Callable[[], list[dict[str, Any]]]) -> None:
    began_s = time.process_time()
    (message,) = translate()
    assert time.process_time() - began_s < 1.0  # takes a tenth of this; quadratic time took several seconds
    assert message["role"] == "user" and message["content"].startswith(TEXT)


def test_repeated_tool_references_have_a_limit() -> None:
    tool = SentTool(name="t", description="x" * 100_000, defer_loading=True)
    tools = offered_tools([tool])
    reference = ContentBlock(type="tool_reference", tool_name="t")
    (message,), _ = anthropic.messages_of(None, [Turn(role="user", content=[reference] * 3)], tools)
    assert message["content"].count("x" * 100_000) == 3
    with pytest.raises(RequestError, match="definitions of more than") as caught:
        anthropic.messages_of(None, [Turn(role="user", content=[reference] * 1000)], tools)
    assert caught.value.code is ErrorCode.INVALID


def test_too_many_prompts_are_rejected_before_they_are_built(shared: Any) -> None:
    reply = shared.ask("POST", "/v1/completions", {"prompt": [[-1]] * 5000})
    assert reply.status == 400 and "number of prompts is 5000" in reply.json["error"]["message"]
