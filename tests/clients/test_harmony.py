"""The Harmony parser against `openai-harmony`: same reasoning, content and calls of accepted outputs.

`openai-harmony` merges messages of outputs with missing marks, so these are not compared here but in
`tests/text/parsers/test_parsers.py`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pytest

from quintet.detokenizer_proc.parsers.json_repair import JsonRepair
from quintet.detokenizer_proc.parsers.registry import build
from quintet.wire.channels import Channel
from tests.clients.test_packages import ENVIRONMENTS, HERE

TEXTS = [
    "Paris",
    "two words",
    "a\nb",
    "日本 😀",
    '{"a": 1}',
    "5 < 6 <| |>",
    "to=functions.f",
    "analysis",
    "{}",
]
ANALYSIS, FINAL, PREAMBLE = "<|channel|>analysis", "<|channel|>final", "<|channel|>commentary"
CALLS = [
    "<|channel|>commentary to=functions.{} <|constrain|>json",
    "<|channel|>commentary to=functions.{} json",
    "<|channel|>commentary to=functions.{}",
    " to=functions.{}<|channel|>commentary <|constrain|>json",
    " to=functions.{}<|channel|>analysis code",
]
BUILT_IN = ["<|channel|>analysis to=browser.search code", "<|channel|>commentary to=python"]


def random_output(random: Random) -> str:
    """Return a random output: messages in any order, sometimes truncated."""
    messages = []
    for _ in range(random.randint(1, 5)):
        header = random.choice([ANALYSIS, FINAL, PREAMBLE, random.choice(CALLS), random.choice(BUILT_IN)])
        is_call = "to=" in header
        text = random.choice(TEXTS)
        messages.append(
            f"{header.format(random.choice('fg'))}<|message|>{text}" + ("<|call|>" if is_call else "<|end|>")
        )
    output = "<|start|>assistant".join(messages)
    if random.randrange(4) == 0:
        return output[: random.randrange(len(output))]
    return output.removesuffix("<|end|>") + "<|return|>" if output.endswith("<|end|>") else output


class Parsed(NamedTuple):
    """Parsed output; messages of one channel are joined by newlines."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def parse(text: str) -> Parsed:
    parser = build("openai_gptoss", "openai", b"", "<|start|>assistant")
    deltas = parser.push(text) + parser.finish()
    texts = {
        channel: "".join(delta.text for delta in deltas if delta.channel is channel)
        for channel in (Channel.REASONING, Channel.CONTENT)
    }
    names = {delta.call: delta.text for delta in deltas if delta.channel is Channel.NAME}
    arguments = dict.fromkeys(names, "")
    for delta in deltas:
        if delta.channel is Channel.ARGUMENTS:
            arguments[delta.call] += delta.text
    calls = [(names[call], arguments[call].rstrip() or "{}") for call in names]
    return Parsed(texts[Channel.REASONING].rstrip(), texts[Channel.CONTENT].rstrip(), calls)


def closed(arguments: str) -> str:
    """Return JSON with the closing brackets that an unfinished output omits."""
    repair = JsonRepair()
    return repair.take(arguments) + repair.end()


def expected_of(messages: Sequence[tuple[str | None, str | None, str]]) -> Parsed:
    """Return the expected output of messages: channel, recipient and text of each."""
    reasoning, content, calls = [], [], []
    for channel, recipient, text in messages:
        if recipient is not None and recipient.startswith("functions."):
            calls.append((recipient.removeprefix("functions."), closed(text.strip()) or "{}"))
        elif text.strip():
            (reasoning if recipient is not None or channel == "analysis" else content).append(text.strip())
    return Parsed("\n".join(reasoning), "\n".join(content), calls)


@pytest.mark.whole
def test_parser_equals_openai_harmony() -> None:
    python = ENVIRONMENTS / "harmony" / "bin" / "python"
    assert python.exists(), f"{python} is missing; `make clients` makes it"
    texts = [random_output(Random(seed)) for seed in range(2000)]
    command = [python, HERE / "references" / "harmony.py"]
    ran = subprocess.run(
        command, input=json.dumps(texts), capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    read = json.loads(ran.stdout)
    accepted = [(text, messages) for text, messages in zip(texts, read, strict=True) if messages is not None]
    assert len(accepted) > 1600, "only outputs truncated within a header are rejected"
    for text, messages in accepted:
        parsed, expected = parse(text), expected_of(messages)
        assert (
            parsed._replace(reasoning=parsed.reasoning.rstrip(), content=parsed.content.rstrip()) == expected
        ), text
