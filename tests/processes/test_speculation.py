"""Speculative decoding on two real engines: responses are those of one engine without drafts.

`tests.chaos.test_drafts` kills each role. `tests.models.speculation` tests the methods in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from bench.chaos.streams import differences, random_requests, run_requests

from tests.chaos.test_drafts import METHODS, draft_flags, write_mimo
from tests.processes.server import Server, serve
from tests.processes.test_thinking_budget import TEMPLATE
from tests.processes.test_tool_calls import TOOLS, H, StreamClient

DRAFTING = "tests.chaos.longest_drafts"
FLAGS = (
    "--kv-cache-memory",
    "24MiB",
    "--max-model-len",
    "1024",
    "--threads",
    "1",
    "--enable-auto-tool-choice",
)
PARSERS = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "array", "items": {"enum": ["Monday", "Thursday"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell of a mouse and the rain."}],
    "max_tokens": 160,
    "temperature": 1.0,
    "thinking_token_budget": 30,
    "stream": True,
    "stream_options": {"include_usage": True},
}
"""Reasoning, then a text or a call."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[] if each == "mtp" else pytest.mark.whole) for each in METHODS],
)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """A server without drafts, and one with drafts on two engines."""
    folder = tmp_path_factory.mktemp("model")
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = (write_mimo(folder), *FLAGS, *PARSERS, "--chat-template", str(template))
    drafts = draft_flags(request.param, tmp_path_factory.mktemp("draft") / "draft")
    with (
        serve(*flags) as plain,
        serve(*flags, "--data-parallel-size", "2", *drafts, program=DRAFTING) as drafting,
    ):
        yield [plain, drafting]


def assert_accepts(server: Server) -> None:
    """Check that the server has accepted drafts."""
    server.await_metrics()
    assert server.gauge("quintet:spec_decode_num_accepted_tokens_total") > 0


def test_streams_are_those_without_drafts(servers: list[Server]) -> None:
    """Several choices, log-probabilities, penalties and stop strings."""
    requests = random_requests(6, 12, (20, 60))
    assert any(each.body.get("n") for each in requests)
    assert any(each.body.get("logprobs") for each in requests)
    plain, drafting = (asyncio.run(run_requests(server.url, requests)) for server in servers)
    assert all(result.status == 200 and result.is_done and not result.error for result in plain.results)
    assert not differences(plain, drafting, requests)
    assert_accepts(servers[1])


@pytest.mark.parametrize("choice", ["none", "required"])
def test_reasoning_and_tool_calls_are_those_without_drafts(servers: list[Server], choice: str) -> None:
    tools = [{"type": "function", "function": {**tool["function"], "parameters": SCHEMA}} for tool in TOOLS]
    for seed in range(2):
        answers = []
        for server in servers:
            client = StreamClient(server, H, {**CHAT, "tools": tools, "tool_choice": choice, "seed": seed})
            for event in client.events():
                client.add(event)
            *answer, usage = client.summary()
            answers.append((*answer, usage["completion_tokens"]))
        assert answers[0] == answers[1]
        reasoning, content, names, *_ = answers[0]
        assert reasoning and bool(names) == (choice == "required") and bool(content) == (choice == "none")
    assert_accepts(servers[1])


def test_beams_are_those_without_drafts(servers: list[Server]) -> None:
    body = {
        "prompt": "A mouse and a",
        "use_beam_search": True,
        "n": 3,
        "max_tokens": 12,
        "return_token_ids": True,
    }
    (_, plain), (_, drafting) = (server.post("/v1/completions", body) for server in servers)
    assert plain["choices"] == drafting["choices"] and len(plain["choices"]) == 3
