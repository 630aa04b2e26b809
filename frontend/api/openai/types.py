"""The bodies of the OpenAI dialect, as clients send them: names, types and (in docstrings) ranges.

An absent or null field takes the server's default. Unknown fields are ignored, as this dialect's servers do; known
fields that are not implemented are refused by `quintet.frontend.api.openai.parse`, never silently dropped.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from quintet.wire.params import SamplingParams

RawField = msgspec.Raw | msgspec.UnsetType
"""JSON that is kept as it came, or was not sent."""
ExtraArgument = str | int | float | bool | list[str | int | float]


MAX_ROLE = 256
"""Characters."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    """End with a chunk that holds ``usage`` and no choices."""
    continuous_usage_stats: bool | None = None
    """Put ``usage`` on every chunk (with ``include_usage``)."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form the output must take."""

    type: str
    """text, json_object, json_schema, structural_tag, regex or grammar."""
    json_schema: RawField = msgspec.UNSET
    schema: RawField = msgspec.UNSET
    """A schema without a name around it, as llama.cpp and Together have it; also with the type json_object."""
    value: RawField = msgspec.UNSET
    """Schema, expression or grammar, as TGI has it."""
    regex: RawField = msgspec.UNSET
    pattern: RawField = msgspec.UNSET
    """As ``regex``."""
    grammar: RawField = msgspec.UNSET
    structures: RawField = msgspec.UNSET
    triggers: RawField = msgspec.UNSET
    format: RawField = msgspec.UNSET


class RepetitionDetection(msgspec.Struct, kw_only=True):
    """End an answer that repeats a pattern of tokens."""

    max_pattern_size: int = 0
    """0 looks for none."""
    min_pattern_size: int = 0
    min_count: int = 0
    """How often the pattern must come, at least 2."""


class FormFields(msgspec.Struct, kw_only=True):
    """The form that the output must take, under the names that servers of this dialect have for it: at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: RawField = msgspec.UNSET
    guided_json: RawField = msgspec.UNSET
    guided_regex: RawField = msgspec.UNSET
    guided_choice: RawField = msgspec.UNSET
    guided_grammar: RawField = msgspec.UNSET
    guided_whitespace_pattern: str | None = None
    json_schema: RawField = msgspec.UNSET
    """A schema, as an object or as text (llama.cpp, SGLang)."""
    regex: RawField = msgspec.UNSET
    ebnf: RawField = msgspec.UNSET
    """A grammar (SGLang)."""
    grammar: RawField = msgspec.UNSET
    """A grammar (llama.cpp), or an object with ``type`` and ``value`` (TGI)."""
    regex_pattern: RawField = msgspec.UNSET
    """As ``regex`` (TabbyAPI)."""
    grammar_string: RawField = msgspec.UNSET
    """As ``grammar`` (TabbyAPI, text-generation-webui)."""
    grammar_lazy: bool | None = None
    """Not implemented: a grammar that begins to count at a trigger."""


class GenerationBody(FormFields, kw_only=True):
    """Fields that completions and chat completions share."""

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    detokenize: bool | None = None
    length_penalty: float | None = None
    early_stopping: RawField = msgspec.UNSET
    """True, false or ``never``."""
    return_token_offsets: bool | None = None
    return_prompt_text: bool | None = None
    return_weight_versions: bool | None = None
    kv_transfer_params: RawField = msgspec.UNSET
    ec_transfer_params: RawField = msgspec.UNSET
    vllm_xargs: dict[str, ExtraArgument] | None = None
    """Arguments of a server's plugins; there are none here that take any."""
    repetition_detection: RepetitionDetection | None = None
    watermarking: RawField = msgspec.UNSET
    thinking_token_budget: int | None = None
    stream_interval: int | None = None
    timeout: float | None = None
    """Seconds after which the answer is of no use any more: more than 0."""
    session_id: str | None = None
    service_tier: str | None = None
    user: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    """Text, token ids, or a list of either."""
    prompt_embeds: str | list[str] | None = None
    """Prompts as vectors: base64 of a safetensors file each. They come before those of ``prompt``."""
    suffix: str | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation. Further fields (``name``, ``tool_calls``, …) reach the chat template unchanged."""

    role: Annotated[str, msgspec.Meta(max_length=MAX_ROLE)]
    """Every choice of an answer may repeat the last one."""
    content: str | list[TextPart | str] | None = None
    tool_calls: list[msgspec.Raw] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: RawField = msgspec.UNSET
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One of the tools the chat template shows to the model."""

    type: str
    function: FunctionTool


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: msgspec.Raw
    """A list of `ChatMessage`; passed on to the chat template as it is."""
    prompt_token_ids: list[int] | None = None
    """The conversation as ids, for clients that rendered it: what ``messages`` says else counts as ever."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: RawField = msgspec.UNSET
    """A list of `Tool`; flat ones and those of other APIs become such (`offered_tools`)."""
    tool_choice: str | dict[str, msgspec.Raw] | None = None
    functions: RawField = msgspec.UNSET
    function_call: RawField = msgspec.UNSET
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    documents: RawField = msgspec.UNSET
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: RawField = msgspec.UNSET
    media_io_kwargs: RawField = msgspec.UNSET
    mm_processor_kwargs: RawField = msgspec.UNSET
    mm_payload: RawField = msgspec.UNSET


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: RawField = msgspec.UNSET
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: RawField = msgspec.UNSET
    tools: RawField = msgspec.UNSET


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong: what was sent, what is allowed, how to fix it."""

    message: str
    type: str
    param: str | None
    code: int | str
    """The status, or ``context_length_exceeded``."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every error."""

    error: ErrorDetail


FORM_FIELDS = tuple(name for name in FormFields.__struct_fields__ if name != "response_format")
SHARED_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationBody.__struct_fields__ and name not in {"structured_outputs", "repetition_detection"}
)
"""Fields of a body that are fields of `SamplingParams` by the same name, and of the same type."""
