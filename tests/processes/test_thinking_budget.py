"""A budget for reasoning on a real server; the executor dies on the way to its end."""

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


def said(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = server.post(H, body)
    assert status == 200, answer
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def test_reasoning_ends_behind_its_budget(server: Server) -> None:
    """And begins as it would without one; what follows is content, a form too."""
    endless = said(server, ASK)
    assert endless["content"] is None
    for budget in (0, 7, 20):
        told = said(server, {**ASK, "thinking_token_budget": budget})
        assert (endless["reasoning"] or "").startswith(told["reasoning"] or "")
        assert told["content"] and MARK not in told["content"]
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"structured_outputs": {"json": schema}, "ignore_eos": False, "max_tokens": 400}
    json.loads(said(server, {**ASK, **form, "thinking_token_budget": 7})["content"])
    assert said(server, {**ASK, "thinking_token_budget": 500})["reasoning"] == endless["reasoning"]


@pytest.mark.whole  # what is forced is a function of the tokens alone: tests/executor/sampling/test_thinking_budget.py
def test_the_executor_dies_before_the_budget_ends(server: Server) -> None:
    body = {**ASK, "thinking_token_budget": 40, "max_tokens": 80}
    undisturbed = said(server, body)
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
