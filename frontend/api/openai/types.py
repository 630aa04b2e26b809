"""Bodies of the OpenAI API: fields, types and (in docstrings) ranges.

An absent or null field takes the server's default. Unknown fields are ignored, as in OpenAI's API. Unsupported fields are
rejected by `quintet.frontend.api.openai.parse`, never dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quintet.wire.params import SamplingParams

RawField = msgspec.Raw | msgspec.UnsetType
"""Raw JSON, or absent."""
ExtraArgument = str | int | float | bool | list[str | int | float]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Additions to a stream."""

    include_usage: bool | None = None
    """End with a chunk with ``usage`` and no choices."""
    continuous_usage_stats: bool | None = None
    """Add ``usage`` to every chunk (with ``include_usage``)."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Output format."""

    type: str
    """text, json_object, json_schema, structural_tag, regex or grammar."""
    json_schema: RawField = msgspec.UNSET
    schema: RawField = msgspec.UNSET
    """A schema without a name, as in llama.cpp and Together; also for json_object."""
    value: RawField = msgspec.UNSET
    """Schema, expression or grammar (TGI)."""
    regex: RawField = msgspec.UNSET
    pattern: RawField = msgspec.UNSET
    """Alias of ``regex``."""
    grammar: RawField = msgspec.UNSET
    structures: RawField = msgspec.UNSET
    triggers: RawField = msgspec.UNSET
    format: RawField = msgspec.UNSET


class RepetitionDetection(msgspec.Struct, kw_only=True):
    """End a choice that repeats a token pattern."""

    max_pattern_size: int = 0
    """0 disables it."""
    min_pattern_size: int = 0
    min_count: int = 0
    """Number of repetitions; at least 2."""


class FormFields(msgspec.Struct, kw_only=True):
    """Output format, under the names of several OpenAI-compatible servers; at most one may be sent."""

    response_format: ResponseFormat | None = None
    structured_outputs: RawField = msgspec.UNSET
    guided_json: RawField = msgspec.UNSET
    guided_regex: RawField = msgspec.UNSET
    guided_choice: RawField = msgspec.UNSET
    guided_grammar: RawField = msgspec.UNSET
    guided_whitespace_pattern: str | None = None
    structural_tag: RawField = msgspec.UNSET
    """A structural tag, as object or text (older vLLM)."""
    json_schema: RawField = msgspec.UNSET
    """A schema, as object or text (llama.cpp, SGLang)."""
    regex: RawField = msgspec.UNSET
    ebnf: RawField = msgspec.UNSET
    """A grammar (SGLang)."""
    grammar: RawField = msgspec.UNSET
    """A grammar (llama.cpp), or an object with ``type`` and ``value`` (TGI)."""
    regex_pattern: RawField = msgspec.UNSET
    """Alias of ``regex`` (TabbyAPI)."""
    grammar_string: RawField = msgspec.UNSET
    """Alias of ``grammar`` (TabbyAPI, text-generation-webui)."""
    grammar_lazy: bool | None = None
    """Not implemented: a grammar that starts at a trigger."""
    extra_body: RawField = msgspec.UNSET
    """Object of which only these fields are read. OpenAI's clients merge it into the body; others send it as it is."""
    nvext: RawField = msgspec.UNSET
    """The same (NVIDIA NIM)."""


class SamplingFields(FormFields, kw_only=True):
    """Sampling parameters of every OpenAI API, under the names of `SamplingParams`, which has their ranges."""

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None


class GenerationBody(SamplingFields, kw_only=True):
    """Fields shared by completions and chat completions."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
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
    """true, false or ``never``."""
    return_token_offsets: bool | None = None
    return_prompt_text: bool | None = None
    return_weight_versions: bool | None = None
    kv_transfer_params: RawField = msgspec.UNSET
    ec_transfer_params: RawField = msgspec.UNSET
    vllm_xargs: dict[str, ExtraArgument] | None = None
    """Arguments of plugins; no plugin takes any."""
    watermarking: RawField = msgspec.UNSET
    moderation: RawField = msgspec.UNSET
    stream_interval: int | None = None
    timeout: float | None = None
    """Deadline in seconds; more than 0."""
    session_id: str | None = None
    service_tier: str | None = None
    user: str | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    """Text, token ids, or a list of either."""
    prompt_embeds: str | list[str] | None = None
    """Prompts as embeddings: each a base64-encoded safetensors file. They precede those of ``prompt``."""
    suffix: str | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: RawField = msgspec.UNSET
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool in the format that chat templates read."""

    type: str
    function: FunctionTool


class ReasoningChoice(msgspec.Struct, kw_only=True):
    """Reasoning switch of other servers' APIs."""

    type: str | None = None
    """``disabled`` turns reasoning off, other values on (Z.ai, DeepSeek, Moonshot, MiniMax)."""
    enabled: bool | None = None
    """The same (OpenRouter, SGLang)."""
    effort: str | None = None
    """As ``reasoning_effort``."""
    exclude: bool | None = None
    """True as ``include_reasoning: false``."""


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    """A list of `ChatMessage`, passed to the chat template unchanged."""
    prompt_token_ids: list[int] | None = None
    """The conversation as token ids, for clients that rendered it. ``messages`` still determines the rest."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: RawField = msgspec.UNSET
    """A list of `Tool`; other formats are translated (`offered_tools`)."""
    tool_choice: str | dict[str, msgspec.Raw] | None = None
    functions: RawField = msgspec.UNSET
    function_call: RawField = msgspec.UNSET
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningChoice | bool | str | None = None
    thinking: ReasoningChoice | bool | str | None = None
    """As ``reasoning``."""
    enable_thinking: bool | None = None
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
    messages: list[Any] | None = None
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
    """Error message, type, field and code."""

    message: str
    type: str
    param: str | None
    code: str
    """The status as text, or ``context_length_exceeded``."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """Body of every error."""

    error: ErrorDetail


FORM_FIELDS = tuple(name for name in FormFields.__struct_fields__ if name != "response_format")
SHARED_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationBody.__struct_fields__ and name not in {"structured_outputs", "repetition_detection"}
)
"""Body fields with the same name and type in `SamplingParams`."""
