"""The bodies of Anthropic's dialect, as clients send them: names, types and (in docstrings) ranges.

Unknown fields are ignored; known ones that are not implemented are refused by `quintet.frontend.api.anthropic.parse`.
"""

from __future__ import annotations

import msgspec

from quintet.frontend.api.openai.offered_tools import SentTool
from quintet.frontend.api.openai.types import FormFields, RawField


class ReferencedTool(msgspec.Struct, kw_only=True):
    """The tool of a tool_addition: a reference by name."""

    type: str | None = None
    name: str | None = None
    tool_name: str | None = None


class Block(msgspec.Struct, kw_only=True):
    """A content block: ``type`` says which of the other fields it has. ``cache_control`` is accepted and says nothing here:
    beginnings are cached by themselves."""

    type: str
    """text, thinking, redacted_thinking, tool_use, tool_result, tool_reference, tool_addition, search_result, or document with a
    source of plain text. Blocks of tools that Anthropic's servers ran are skipped."""
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: RawField = msgspec.UNSET
    tool_use_id: str | None = None
    content: str | list[Block] | Block | None = None
    tool_name: str | None = None
    tool: ReferencedTool | None = None
    is_error: bool | None = None
    title: str | None = None
    source: RawField = msgspec.UNSET


class Turn(msgspec.Struct, kw_only=True):
    """A message of the conversation."""

    role: str
    """user, assistant or system."""
    content: str | list[Block]


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether tools are called."""

    type: str
    """auto, any, tool or none."""
    name: str | None = None
    """Of the tool, with ``type`` tool."""
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(msgspec.Struct, kw_only=True):
    """Whether the model reasons before it answers, where its template lets one choose."""

    type: str
    """enabled, adaptive, between_tools or disabled."""
    budget_tokens: int | None = None
    """At least 1024, and less than ``max_tokens``."""


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much effort an answer is worth, and its form."""

    effort: str | None = None
    format: RawField = msgspec.UNSET


class ConversationBody(FormFields, kw_only=True):
    """Fields that POST /v1/messages and /v1/messages/count_tokens share."""

    model: str | None = None
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[SentTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    output_format: RawField = msgspec.UNSET
    """As ``output_config.format``: its older name."""
    chat_template_kwargs: RawField = msgspec.UNSET
    mcp_servers: RawField = msgspec.UNSET
    container: RawField = msgspec.UNSET
    thread: RawField = msgspec.UNSET


class MessagesBody(ConversationBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    """An upper bound: an answer ends at the end of the model's context too."""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    """Seconds after which the answer is of no use any more: more than 0."""


class CountTokensBody(ConversationBody, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesErrorDetail(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What went wrong: what was sent, what is allowed, how to fix it."""

    type: str
    message: str
    details: dict[str, str] | None = None
    """What packages act upon."""


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    """The body of every error of this dialect."""

    type: str
    error: MessagesErrorDetail
    request_id: str
