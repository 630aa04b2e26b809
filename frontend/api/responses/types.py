"""Bodies of the Responses API: fields, types and (in docstrings) ranges.

Unknown fields are ignored; unsupported ones are rejected by `quintet.frontend.api.responses.parse`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quintet.frontend.api.openai.types import ExtraArgument, RawField, SamplingFields


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of an item's content; ``type`` selects the other fields."""

    type: str = ""
    """input_text, output_text, refusal, reasoning_text or summary_text; also text. Without a type it is text or a command's
    output."""
    text: str | None = None
    refusal: str | None = None
    encrypted_content: str | None = None
    """Text of an agent_message: Codex sends the argument of a call so, which this server does not encrypt."""
    stdout: str | None = None
    """With ``stderr`` and ``outcome``: output of one command in a shell_call_output; such a part has no type."""
    stderr: str | None = None
    outcome: CommandOutcome | None = None


class CommandOutcome(msgspec.Struct, kw_only=True):
    """End of a command in a shell_call_output."""

    type: str
    """exit or timeout."""
    exit_code: int | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """Function of a `ChatCall`."""

    name: str
    arguments: str | dict[str, msgspec.Raw] | None = None


class ChatCall(msgspec.Struct, kw_only=True):
    """A call in a message, in the format of chat completions."""

    function: CalledFunction
    id: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """An item of the conversation; ``type`` selects the other fields. Without a type it is a message."""

    type: str | None = None
    """message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, local_shell_call,
    local_shell_call_output, shell_call, shell_call_output, apply_patch_call, apply_patch_call_output, tool_search_call,
    tool_search_output, additional_tools, agent_message, mcp_call, reasoning, configuration_update or item_reference.
    Items of other types are skipped."""
    id: str | None = None
    role: str | None = None
    """user, assistant, system or developer; tool for a result in the format of chat completions."""
    content: str | list[ContentPart] | None = None
    tool_calls: list[ChatCall] | None = None
    """Calls of a message in the format of chat completions."""
    tool_call_id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    """Namespace of the called tool."""
    arguments: str | dict[str, msgspec.Raw] | None = None
    input: str | None = None
    """Input of a freeform tool call."""
    action: RawField = msgspec.UNSET
    """Action of a shell call: an object with the command or commands."""
    operation: RawField = msgspec.UNSET
    """Operation of an apply_patch_call: an object with type, path and diff."""
    tools: RawField = msgspec.UNSET
    """Tools found by a search, or added here."""
    execution: str | None = None
    """Side that runs a tool search: client or server."""
    output: str | list[Any] | dict[str, Any] | None = None
    """Text, a list of `ContentPart` and texts, or other data, which becomes JSON text."""
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    """Text of reasoning without content, as this server sent it."""
    reasoning: RawField = msgspec.UNSET
    """`ReasoningOptions` of a configuration_update: its effort applies from there on."""
    text: RawField = msgspec.UNSET
    """`TextOptions` of a configuration_update: its format applies from there on."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Reasoning options. Summaries are not generated: reasoning is returned verbatim."""

    effort: str | None = None
    """none, minimal, low, medium, high, xhigh or max."""
    summary: str | None = None
    generate_summary: str | None = None


class NestedFormat(msgspec.Struct, kw_only=True):
    """Schema of a `TextFormat`, in the format of chat completions."""

    name: str | None = None
    description: str | None = None
    schema: RawField = msgspec.UNSET
    strict: bool | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """Format of the output text."""

    type: str
    """text, json_object or json_schema."""
    name: str | None = None
    description: str | None = None
    schema: RawField = msgspec.UNSET
    strict: bool | None = None
    json_schema: NestedFormat | None = None
    """The other fields, in the format of chat completions."""


class TextOptions(msgspec.Struct, kw_only=True):
    """Options of the output text."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """low, medium or high."""


class NamedFunction(msgspec.Struct, kw_only=True):
    """Function of a `NamedTool`."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """``tool_choice`` as an object: one tool, or some of the tools."""

    type: str
    """function, custom, another type of tools, or allowed_tools; also auto, none, required or any, as in Anthropic's API."""
    name: str | None = None
    namespace: str | None = None
    function: NamedFunction | None = None
    """The name, in the format of chat completions."""
    mode: str | None = None
    """auto or required, with ``type`` allowed_tools."""
    tools: list[NamedTool] | None = None


class NamedConversation(msgspec.Struct, kw_only=True):
    """``conversation`` as an object."""

    id: str


class ConversationBody(msgspec.Struct, kw_only=True):
    """POST /v1/conversations."""

    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None
    """At most 16 pairs, of up to 64 and 512 characters."""


class ConversationChange(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{id}."""

    metadata: dict[str, str] | None = None


class ItemsBody(msgspec.Struct, kw_only=True):
    """POST /v1/conversations/{id}/items."""

    items: list[InputItem]


class EventOptions(msgspec.Struct, kw_only=True):
    """Stream options; none has an effect."""

    include_obfuscation: bool | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: RawField = msgspec.UNSET
    """Text, or a list of `InputItem`. May be empty after instructions or a conversation."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    """Upper bound; the context length limits too."""
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    """At most 16 pairs, of up to 64 and 512 characters."""
    previous_response_id: str | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    include_reasoning: bool | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    service_tier: str | None = None
    text: TextOptions | None = None
    tools: RawField = msgspec.UNSET
    """A list of `quintet.frontend.api.openai.offered_tools.SentTool`."""
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    """disabled or auto; auto drops the start of a prompt that is too long."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    """Deadline in seconds; more than 0."""
    chat_template_kwargs: RawField = msgspec.UNSET
    prompt: RawField = msgspec.UNSET
    conversation: RawField = msgspec.UNSET
    """Id of a conversation, or an object with it: the response is appended to it."""
    context_management: RawField = msgspec.UNSET
    """Accepted without effect: nothing is compacted."""
    moderation: RawField = msgspec.UNSET
    previous_input_messages: RawField = msgspec.UNSET
    kv_transfer_params: RawField = msgspec.UNSET
    ec_transfer_params: RawField = msgspec.UNSET
    vllm_xargs: dict[str, ExtraArgument] | None = None
