"""Answers in channels, as chat completions spell them: reasoning, content and calls of tools."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from quintet.frontend.streams import pieces
from quintet.wire.channels import Channel, Span
from quintet.wire.config import CallIds

DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Channels(msgspec.Struct, array_like=True, frozen=True):
    """How an answer tells its channels."""

    response_id: str
    """Ids of calls derive from it: they are the same, whoever goes on with the answer."""
    call_ids: CallIds = "random"
    num_calls_before: int = 0
    """Calls in the conversation so far."""
    include_reasoning: bool = True
    parallel_calls: bool = True
    """Whether calls after the first are told."""

    def call_id(self, choice: int, call: int, name: str) -> str:
        """Return the id of a call, as the model's template wants it."""
        if self.call_ids == "numbered":
            return f"functions.{name}:{self.num_calls_before + call}"
        digest = hashlib.blake2b(f"{self.response_id}:{choice}:{call}".encode(), digest_size=12)
        if self.call_ids == "short":
            number = int.from_bytes(digest.digest(), "little")
            return "".join(DIGITS[number // len(DIGITS) ** place % len(DIGITS)] for place in range(9))
        return f"call_{digest.hexdigest()}"

    def told(self, choice: int, text: str, spans: Sequence[Span]) -> TextByChannel:
        """Sort a text, or a part of it, by what is told how."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, dict[str, object]] = {}
        arguments: dict[int, str] = {}
        for channel, call, part in pieces(text, spans):
            if channel == Channel.CONTENT:
                content.append(part)
            elif channel == Channel.REASONING:
                if self.include_reasoning:
                    reasoning.append(part)
            elif call == 0 or self.parallel_calls:
                told = calls.setdefault(call, {"index": call})
                if channel == Channel.NAME:
                    told |= {"id": self.call_id(choice, call, part), "type": "function", "name": part}
                    part = ""  # noqa: PLW2901
                arguments[call] = arguments.get(call, "") + part
        for call, told in calls.items():
            function = {"arguments": arguments[call]}
            if "name" in told:
                function = {"name": str(told.pop("name")), **function}
            told["function"] = function
        return TextByChannel("".join(content), "".join(reasoning), list(calls.values()))


class TextByChannel(msgspec.Struct):
    """A text by channels."""

    content: str
    reasoning: str
    calls: list[dict[str, object]]

    def delta(self) -> dict[str, object]:
        """Return a streamed chunk's delta; empty when there is nothing to tell."""
        delta: dict[str, object] = {}
        if self.reasoning:
            delta |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.content:
            delta["content"] = self.content
        if self.calls:
            delta["tool_calls"] = self.calls
        return delta

    def message(self, role: str, prefix: str) -> dict[str, object]:
        """Return a whole answer's message; ``prefix`` is echoed before its content."""
        content = prefix + self.content
        is_empty = not content and bool(self.calls or self.reasoning)
        message: dict[str, object] = {"role": role, "content": None if is_empty else content, "refusal": None}
        reasoning = self.reasoning or None
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self.calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in self.calls
            ]
        return message
