"""Messages between processes, except step plans and results: sender, receiver and guarantees.

Frames of one sender to one receiver arrive in order; frames of different senders do not. All times are
``time.monotonic_ns()`` of the host.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quintet.wire.channels import RowSpans, TextSpan
from quintet.wire.embeds import EmbedsPrompt, EmbedsSpan
from quintet.wire.errors import ErrorCode
from quintet.wire.ids import Count, Id, SlotIndex, WorkerId
from quintet.wire.params import StopString
from quintet.wire.request import Choice, Echo, OutputParsing, RequestSpec
from quintet.wire.step import DraftCounts, PromptLogprobs, TokenLogprobs


class FinishReason(IntEnum):
    """Reason for which a request ended. `NONE` in a column means that it has not."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5


# --- request path: frontend -> tokenizer -> core -----------------------------------------------------------------


class TextPrompt(msgspec.Struct, array_like=True, tag="text"):
    """A prompt as text."""

    text: str
    add_special_tokens: bool = True
    suffix: str = ""
    """Text after the output, for fill-in-the-middle."""


class TokenPrompt(msgspec.Struct, array_like=True, tag="ids"):
    """A prompt as token ids (int32)."""

    token_ids: bytes


class ChatPrompt(msgspec.Struct, array_like=True, tag="chat"):
    """A conversation, rendered by the model's chat template.

    ``messages`` is encoded by `wire.chat`. ``tools`` and ``template_kwargs`` are JSON.
    """

    messages: bytes
    tools: bytes = b""
    template_kwargs: bytes = b""
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    message_names: list[str] = []
    """Name of each message for errors, for example ``input[3]``; messages beyond the list are called ``messages[i]``."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt | EmbedsPrompt


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """Frontend -> tokenizer: serve this request.

    A request with ``spec.params.n`` choices owns the ids ``request_id … request_id + n - 1``, one per choice.

    A frontend that lost the core or the detokenizer of a request resends it with a higher ``attempt``. If no output
    was received, it resends the whole request. Otherwise it resends each open choice alone (``n`` is then 1) with its
    outputs. The newest attempt replaces older ones; a duplicate is ignored.
    """

    request_id: Id
    prompt: Prompt
    spec: RequestSpec
    sent_ns: int
    core: SlotIndex
    """Index of the core replica to admit to."""
    clamp_max_tokens: bool = False
    """``max_tokens`` is an upper bound, which a long prompt may reduce. Otherwise it is rejected if it does not fit."""
    session: str = ""
    """Conversation key for engine affinity, "" for none. The frontend finds it again in a retained request."""


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """Frontend -> tokenizer -> core, on the same path as the request, so it never overtakes it.

    Every id gets an answer, unless a flag says otherwise. A live request gets `FinishReason.ABORT` through the
    detokenizer, an ended one has had its finish, and an unknown one gets `Unknown`.
    """

    request_ids: list[Id]
    core: SlotIndex
    keep: bool = False
    """The client disconnected but may reconnect: send no answer and retain resumable requests for the grace period."""
    moved: bool = False
    """The frontend continues them at another engine: send no answer and forget them."""


class Admit(msgspec.Struct, array_like=True, tag="admit"):
    """Tokenizer -> core: the request as ids."""

    request_id: Id
    prompt_ids: bytes
    spec: RequestSpec
    sent_ns: int
    bad_word_ids: list[list[int]] = []
    embeds: list[EmbedsSpan] = []
    """Tokens given as embeddings, in order of positions; ``prompt_ids`` has any known id for each of them."""


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """Tokenizer or core -> frontend: all choices of the request ended with an error and produce nothing more."""

    request_id: Id
    code: ErrorCode
    message: str
    param: str | None = None
    retry_s: Count = 0
    """Delay in seconds before a retry; 0 if unknown."""


class Resume(msgspec.Struct, array_like=True, tag="resume"):
    """Frontend -> core: a client resumes a request after its frontend or connection was lost."""

    query_id: Id
    frontend: SlotIndex
    request_id: Id
    """Id of the first choice."""
    key: bytes
    topology: int = 0
    """As in `RequestSpec`."""
    rename_to: Id = 0
    """New first id of the retained request, issued by this frontend; its client may still use older ids."""


class Resumed(msgspec.Struct, array_like=True, tag="resumed"):
    """Core -> frontend: result of `Resume`. Submit the choices with new ids, `RequestSpec.resumes` and their outputs."""

    query_id: Id
    admit: Admit | None
    """The original message; None when the request is unknown or expired."""
    choices: list[tuple[Choice, bytes]] = []
    """Index and outputs so far (int32) of each choice."""
    core: SlotIndex = 0
    """Index of the sending core, which must get the resumed request."""


class Live(msgspec.Struct, array_like=True, tag="live"):
    """Live-request report. The receiver ends requests of the sender that are missing from it.

    Frontend -> core: its live choices. Core -> detokenizer: the choices open there.
    """

    sender: WorkerId
    request_ids: bytes
    """int64[K]"""


class InFlightReport(msgspec.Struct, array_like=True, tag="in_flight"):
    """Frontend -> tokenizer -> core, on the request path: live choices that took this path.

    The tokenizer removes those it still holds. A choice that the core does not know in two reports in a row is lost.
    """

    sender: WorkerId
    tokenizer: SlotIndex
    core: SlotIndex
    request_ids: bytes
    """int64[K]"""
    attempts: bytes
    """int32[K]: newest attempt of each."""


class Unknown(msgspec.Struct, array_like=True, tag="unknown"):
    """Detokenizer -> core -> frontend, or tokenizer -> frontend: these choices (int64[K]) are unknown to the sender.

    The frontend resends them; those that it has cancelled have ended.
    """

    request_ids: bytes


# --- output path: core -> detokenizer -> frontend ----------------------------------------------------------------


class Open(msgspec.Struct, array_like=True, gc=False):
    """Inside `Tokens`: opens a choice at the detokenizer."""

    request_id: Id
    num_prompt_tokens: Count
    num_cached_tokens: Count
    prompt_ids: bytes
    """Whole prompt with ``echo`` or ``return_prompt_ids``; else its tail (`PROMPT_TAIL`), as context of the output."""
    stop: list[StopString]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    detokenize: bool
    echo: Echo
    return_prompt_ids: bool
    min_tokens: int
    arrival_ns: int
    scheduled_ns: int
    """Time at which its first step was planned."""
    output_ids: bytes = b""
    """int32: outputs known before (recovery): rebuild the text."""
    prompt_logprobs: bool = False
    """`Tokens.prompt_logprobs` will have entries for it. False for a prompt of one token, which has none."""
    num_seen: int = 0
    """Number of ``output_ids`` that the frontend has; the others are sent to it at once."""
    attempt: Count = 0
    """Replaces the detokenizer's state of an older attempt."""
    parsing: OutputParsing | None = None
    """Output parsers; None for plain text."""


PROMPT_TAIL = 16
"""Prompt tokens that `Open` carries as context."""


class Tokens(msgspec.Struct, array_like=True, tag="tokens", gc=False):
    """Core -> detokenizer, one per step: new tokens of all requests of this detokenizer."""

    step: int
    sent_ns: int
    opens: list[Open]
    request_ids: bytes
    """int64[K]"""
    first_indexes: bytes
    """int32[K]: output index of the row's first new token; tokens already applied are dropped."""
    num_tokens: bytes
    """uint8[K]: new tokens of the row; 0 with a finish is an end without a token."""
    token_ids: bytes
    """int32[sum of num_tokens]"""
    finishes: bytes
    """uint8[K]: `FinishReason`"""
    named_stops: bytes
    """int32[…]: rows that ended with a stop token named by the request."""
    logprobs: list[TokenLogprobs] = []
    """``row`` is the row of this message."""
    prompt_logprobs: list[PromptLogprobs] = []
    """``row`` is the row of this message, which may have no tokens yet."""
    core_epoch: int = 0
    """Epoch of the sender: tokens of a replaced core are dropped."""
    closed: bytes = b""
    """int64[…]: requests moved to another detokenizer; applied first."""
    core: SlotIndex = 0
    """Index of the sender. A newer attempt from another core replaces the request of the older core."""
    num_drafts: bytes = b""
    """uint8[K], or empty for zeros: draft tokens that the step of the row verified."""


class StopHit(msgspec.Struct, array_like=True, tag="stop_hit", gc=False):
    """Detokenizer -> core: these requests ended in their text (a stop string). The client has its answer already."""

    request_ids: bytes
    """int64[K]"""
    attempts: bytes = b""
    """int32[K]: the attempt that ended; the core continues a newer one."""


class Alternative(msgspec.Struct, array_like=True, gc=False):
    """One token with its text and log-probability."""

    token_id: int
    logprob: float
    token: str
    token_bytes: bytes
    rank: int


class PositionLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the token itself, then the most likely ones."""

    chosen: Alternative
    top: list[Alternative]
    text_offset: int
    """Offset of the token's text in the whole text, in characters (prompt included when echoed)."""


class Started(msgspec.Struct, array_like=True, gc=False):
    """Inside `Text`: the first token of the request was computed."""

    request_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    arrival_ns: int
    scheduled_ns: int
    prompt_ids: bytes = b""
    prompt_text: str | None = None
    """Set when echoed."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    first_token: Alternative | None = None
    """First prompt token, with log-probability 0, if the prompt is echoed with log-probabilities."""


class Finish(msgspec.Struct, array_like=True, gc=False):
    """Inside `Text`: the request has ended; exactly one per choice."""

    request_id: int
    reason: FinishReason
    stop_reason: str | int | None
    num_output_tokens: int
    num_reasoning_tokens: int = 0
    """Reasoning tokens among them, by the request's output parser."""
    num_calls: int = 0
    """Tool calls in the output."""
    drafts: DraftCounts | None = None


class RowLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Inside `Text`: log-probabilities of the tokens of one row."""

    row: int
    positions: list[PositionLogprobs]


class Text(msgspec.Struct, array_like=True, tag="text_out", gc=False):
    """Detokenizer -> frontend, one per step: new text and ends of this frontend's requests.

    Apply in this order: ``started``, rows, ``finishes``.
    """

    step: int
    sent_ns: int
    tokens_sent_ns: int
    """Time at which the core sent the tokens of this step."""
    started: list[Started]
    request_ids: list[int]
    deltas: list[str]
    """New text of each row, of all channels; empty while a character or a possible stop string is incomplete."""
    offsets: list[int]
    """Characters of output text (all channels) before the delta: text already received is dropped."""
    first_indexes: list[int]
    """Output index of the row's first new token."""
    num_tokens: list[int]
    token_ids: bytes
    """int32[sum of num_tokens]"""
    finishes: list[Finish]
    logprobs: list[RowLogprobs] = []
    sender: tuple[int, int] = (0, 0)
    """Index and epoch of the detokenizer: text of a replaced one is dropped."""
    spans: list[RowSpans] = []
    """Spans of the rows with `OutputParsing`; the text of other rows is content."""


# --- queries ------------------------------------------------------------------------------------------------------


class TokenizeQuery(msgspec.Struct, array_like=True, tag="tokenize"):
    """Frontend -> tokenizer: encode only."""

    query_id: Id
    frontend: SlotIndex
    prompt: TextPrompt | ChatPrompt
    return_token_strs: bool = False
    until_ns: int | None = None
    """Time at which the client's timeout expires (`time.monotonic_ns`); None: never."""


class Tokenized(msgspec.Struct, array_like=True, tag="tokenized"):
    """Tokenizer -> frontend: the result or an error."""

    query_id: Id
    token_ids: bytes
    token_strs: list[str] | None = None
    error: Failed | None = None


class DetokenizeQuery(msgspec.Struct, array_like=True, tag="detokenize"):
    """Frontend -> detokenizer: decode only."""

    query_id: Id
    frontend: SlotIndex
    token_ids: bytes
    opened: Open | None = None
    """Decode them as the whole output of this request; None: as text, special tokens included."""
    is_cut: bool = False  # a limit ended that output, not the model


class Detokenized(msgspec.Struct, array_like=True, tag="detokenized"):
    """Detokenizer -> frontend: the result or an error."""

    query_id: Id
    text: str
    error: Failed | None = None
    spans: list[TextSpan] = []
    """Channels of the text, with `OutputParsing`."""
    num_reasoning_tokens: int = 0
    num_calls: int = 0
