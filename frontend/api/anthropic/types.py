"""Bodies of the Anthropic API: fields, types and (in docstrings) ranges.

Unknown fields are ignored; unsupported ones are rejected by `quintet.frontend.api.anthropic.parse`.
"""

from __future__ import annotations

import msgspec

from quintet.frontend.api.openai.offered_tools import SentTool
from quintet.frontend.api.openai.types import FormFields, RawField


class ReferencedTool(msgspec.Struct, kw_only=True):
    """Tool of a tool_addition or tool_removal."""

    type: str | None = None
    """tool_reference, tool_definition, or a reference to tools of an MCP server, which is skipped."""
    name: str | None = None
    tool_name: str | None = None
    server_name: str | None = None
    definition: SentTool | None = None
    """The tool itself, as in ``tools``."""


class ContentBlock(msgspec.Struct, kw_only=True):
    """A content block; ``type`` selects the other fields. ``cache_control`` is accepted and ignored: all prefixes are cached."""

    type: str
    """text, thinking, redacted_thinking, tool_use, tool_result, tool_reference, tool_addition, search_result, or document with a
    plain text source. Blocks of Anthropic's server tools are skipped."""
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: RawField = msgspec.UNSET
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | ContentBlock | None = None
    tool_name: str | None = None
    tool: ReferencedTool | None = None
    is_error: bool | None = None
    title: str | None = None
    source: RawField = msgspec.UNSET


class Turn(msgspec.Struct, kw_only=True):
    """A message of the conversation."""

    role: str
    """user, assistant, system or developer."""
    content: str | list[ContentBlock] | None = None
    """Null only for assistant and system messages without text."""
    output_config: OutputConfig | None = None
    """Of a system message; its effort takes precedence over earlier ones."""
    clear_at: str | None = None
    """``next_user_message`` hides a system message before a later user message."""


class ToolChoice(msgspec.Struct, kw_only=True):
    """Tool choice."""

    type: str
    """auto, any, tool or none."""
    name: str | None = None
    """Tool name, for ``type`` tool."""
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(msgspec.Struct, kw_only=True):
    """Reasoning switch, for templates that have one."""

    type: str
    """enabled, adaptive, between_tools or disabled."""
    budget_tokens: int | None = None
    """Maximum number of reasoning tokens, unless ``disabled``; 0: no reasoning."""


class OutputConfig(msgspec.Struct, kw_only=True):
    """Reasoning effort and output format."""

    effort: str | None = None
    format: RawField = msgspec.UNSET


class ConversationBody(FormFields, kw_only=True):
    """Fields shared by POST /v1/messages and /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[Turn]
    system: str | list[ContentBlock] | None = None
    tools: list[SentTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    output_format: RawField = msgspec.UNSET
    """Older name of ``output_config.format``."""
    chat_template_kwargs: RawField = msgspec.UNSET
    mcp_servers: RawField = msgspec.UNSET
    container: RawField = msgspec.UNSET
    thread: RawField = msgspec.UNSET
    compaction: RawField = msgspec.UNSET


class MessagesBody(ConversationBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    """Upper bound; the context length limits too. 0 caches the prompt without an answer."""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    """Deadline in seconds; more than 0."""


class CountTokensBody(ConversationBody, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesErrorDetail(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Error message and type."""

    type: str
    message: str
    details: dict[str, str] | None = None
    """Codes that client libraries act on."""


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    """Body of every error of this API."""

    type: str
    error: MessagesErrorDetail
    request_id: str
