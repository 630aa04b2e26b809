"""Output channels in chat completions: reasoning, content and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from quintet.frontend.api.openai.chat_body import Conversation
from quintet.frontend.api.openai.types import ChatBody
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.streams import text_spans
from quintet.wire.channels import Channel, TextSpan
from quintet.wire.config import CallIds, EngineConfig

REASONING_NAMES = ("reasoning", "reasoning_content")
"""Fields of the reasoning; the second one is an older name."""
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def reasoning_names(http_request: HttpRequest) -> tuple[str, ...]:
    """Return the `REASONING_NAMES` that a client can read: one for OpenAI's Agents SDK and for Rust's reqwest.

    The SDK shows reasoning with two names twice, and forgets it. JSON parsers of Rust reject a message with two names of one
    field; those that know only one of them know the second. reqwest sends no User-Agent, but Accept with any type.
    """
    user_agent = http_request.header("user-agent") or ""
    if user_agent.startswith("Agents/"):
        return REASONING_NAMES[:1]
    is_reqwest = not user_agent and http_request.header("accept") == "*/*"
    return REASONING_NAMES[1:] if is_reqwest else REASONING_NAMES


class Channels(msgspec.Struct, array_like=True, frozen=True):
    """Format of the channels of a response."""

    response_id: str
    """Call ids derive from it, so that they are the same after a resume."""
    call_ids: CallIds = "random"
    num_calls_before: int = 0
    """Tool calls in the conversation so far."""
    include_reasoning: bool = True
    parallel_calls: bool = True
    """True if calls after the first are sent."""
    reasoning_names: tuple[str, ...] = REASONING_NAMES
    """Fields in which the reasoning is sent."""

    def call_id(self, choice: int, call: int, name: str) -> str:
        """Return the id of a call, in the format of the model's template."""
        if self.call_ids == "numbered":
            return f"functions.{name}:{self.num_calls_before + call}"
        digest = hashlib.blake2b(f"{self.response_id}:{choice}:{call}".encode(), digest_size=12)
        if self.call_ids == "short":
            number = int.from_bytes(digest.digest(), "little")
            return "".join(DIGITS[number // len(DIGITS) ** place % len(DIGITS)] for place in range(9))
        return f"call_{digest.hexdigest()}"

    def split(self, choice: int, text: str, spans: Sequence[TextSpan]) -> TextByChannel:
        """Split a text, or a part of one, by channel."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, dict[str, object]] = {}
        arguments: dict[int, str] = {}
        for channel, call, part in text_spans(text, spans):
            if channel == Channel.CONTENT:
                content.append(part)
            elif channel == Channel.REASONING:
                if self.include_reasoning:
                    reasoning.append(part)
            elif call == 0 or self.parallel_calls:
                call_fields = calls.setdefault(call, {"index": call})
                if channel == Channel.NAME:
                    call_fields |= {"id": self.call_id(choice, call, part), "type": "function", "name": part}
                    part = ""  # noqa: PLW2901
                arguments[call] = arguments.get(call, "") + part
        for call, call_fields in calls.items():
            function = {"arguments": arguments[call]}
            if "name" in call_fields:
                function = {"name": str(call_fields.pop("name")), **function}
            call_fields["function"] = function
        return TextByChannel("".join(content), "".join(reasoning), list(calls.values()), self.reasoning_names)


class TextByChannel(msgspec.Struct):
    """A text, split by channel."""

    content: str
    reasoning: str
    calls: list[dict[str, object]]
    reasoning_names: Sequence[str]

    def deltas(self) -> list[dict[str, object]]:
        """Return the deltas of one or more streamed chunks; a single empty one if there is nothing to send.

        Each has one kind of text or one call, as in OpenAI's API: Haystack rejects two kinds, Spring AI two calls, and some
        clients read the first call only.
        """
        deltas: list[dict[str, object]] = []
        if self.reasoning:
            deltas.append(dict.fromkeys(self.reasoning_names, self.reasoning))
        if self.content:
            deltas.append({"content": self.content})
        deltas += [{"tool_calls": [call]} for call in self.calls]
        return deltas or [{}]

    def message(self, role: str, prefix: str) -> dict[str, object]:
        """Return the message of an unstreamed response; ``prefix`` is echoed before its content."""
        content = prefix + self.content
        is_empty = not content and bool(self.calls or self.reasoning)
        message: dict[str, object] = {"role": role, "content": None if is_empty else content, "refusal": None}
        message |= dict.fromkeys(self.reasoning_names, self.reasoning or None)
        if self.calls:
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in self.calls
            ]
        return message


def channels_of(
    body: ChatBody, conversation: Conversation, response_id: str, config: EngineConfig, sender: HttpRequest
) -> Channels:
    """Return the output channels of a response. sender: the request."""
    return Channels(
        response_id,
        config.model.parsers.call_ids,
        conversation.num_calls,
        include_reasoning=body.include_reasoning is not False,
        parallel_calls=body.parallel_tool_calls is not False,
        reasoning_names=reasoning_names(sender),
    )
