"""``thinking_token_budget`` on a real server, and a kill of the executor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.processes.server import Server, serve

H = "/v1/chat/completions"
MARK = "</think>"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
HELLO = [{"role": "user", "content": "Tell of a mouse."}]
ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 60, "seed": 3, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--kv-cache-memory", "64MiB", "--chat-template", str(template), "--reasoning-parser", "qwen3")
    with serve(*flags) as server:
        yield server


def message_of(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = server.post(H, body)
    assert status == 200, answer
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def test_reasoning_ends_at_its_budget(server: Server) -> None:
    """The reasoning is a prefix of the unlimited one; content follows, also with a schema."""
    unlimited = message_of(server, ASK)
    assert unlimited["content"] is None
    for budget in (0, 7, 20):
        limited = message_of(server, {**ASK, "thinking_token_budget": budget})
        assert (unlimited["reasoning"] or "").startswith(limited["reasoning"] or "")
        assert limited["content"] and MARK not in limited["content"]
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constraint = {"structured_outputs": {"json": schema}, "ignore_eos": False, "max_tokens": 400}
    json.loads(message_of(server, {**ASK, **constraint, "thinking_token_budget": 7})["content"])
    assert message_of(server, {**ASK, "thinking_token_budget": 500})["reasoning"] == unlimited["reasoning"]


@pytest.mark.whole  # tests/executor/sampling/test_thinking_budget.py: forced tokens depend on the tokens only
def test_executor_kill_keeps_the_thinking_budget(server: Server) -> None:
    body = {**ASK, "thinking_token_budget": 40, "max_tokens": 80}
    undisturbed = message_of(server, body)
    pieces = {"reasoning": "", "content": ""}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id, stream=True, extra_body=body, messages=[]
        )
        for number, chunk in enumerate(stream):
            for name in pieces:
                pieces[name] += getattr(chunk.choices[0].delta, name, None) or ""
            if number == 30:
                server.children()["quintet-executor-0"].kill()
    assert pieces == {name: undisturbed[name] for name in pieces}
