"""Every message between processes except the step pair: who sends it, to whom, and what the receiver may rely on.

Frames of one sender to one receiver arrive in order; frames of different senders do not. All times are
``time.monotonic_ns()`` of the host.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quintet.wire.channels import RowSpans, Span
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.errors import ErrorCode
from quintet.wire.ids import WorkerId
from quintet.wire.request import Echo, OutputParsing, RequestSpec
from quintet.wire.step import PromptLogprobs, TokenLogprobs


class FinishReason(IntEnum):
    """Why a request ended. `NONE` in a column means that it has not."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5


# --- a request's way in: frontend -> tokenizer -> core ---------------------------------------------------------


class TextPrompt(msgspec.Struct, array_like=True, tag="text"):
    """A prompt as text."""

    text: str
    add_special_tokens: bool = True
    suffix: str = ""
    """What the output stands before: it is to be filled in between."""


class TokenPrompt(msgspec.Struct, array_like=True, tag="ids"):
    """A prompt as token ids (int32)."""

    token_ids: bytes


class ChatPrompt(msgspec.Struct, array_like=True, tag="chat"):
    """A conversation, rendered by the model's chat template.

    ``messages``, ``tools`` and ``template_kwargs`` are JSON: only the tokenizer process looks inside.
    """

    messages: bytes
    tools: bytes = b""
    template_kwargs: bytes = b""
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    message_names: list[str] = []
    """The client's own name of each message, e.g. ``input[3]``, for errors; those beyond its end are ``messages[i]``."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt | EmbedsPrompt


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """Frontend -> tokenizer: serve this request.

    A request with ``spec.params.n`` choices owns the ids ``request_id … request_id + n - 1``, one per choice.

    A frontend that lost the core or the detokenizer of a request sends it again with a higher ``attempt``: as it was if
    nothing came back yet, else each open choice for itself (``n`` is then 1) with the outputs that were received. The
    newest attempt is the one that counts, wherever it meets an older one; the same attempt twice is one.
    """

    request_id: int
    prompt: Prompt
    spec: RequestSpec
    sent_ns: int
    core: int
    """Index of the core replica to admit to."""
    limit_gives_way: bool = False
    """Whether ``max_tokens`` is a default, which a long prompt may cut short: only the client's own number is refused."""
    session: str = ""
    """What the request has in common with others of its conversation, "" for nothing: its frontend chooses engines by it, and
    finds it here where it sends a kept request again."""


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """Frontend -> tokenizer -> core, on the same path as the request, so it never overtakes it.

    Every id gets an answer, unless a flag says otherwise. The core sends a finish of `FinishReason.ABORT` through the
    detokenizer for one that was alive; one that has ended had its answer; of one that it never heard of, or that the tokenizer
    had not passed on, the frontend hears as `Unknown`.
    """

    request_ids: list[int]
    core: int
    keep: bool = False
    """The client is gone but may come back: answer nothing, and keep resumable requests for the time of grace."""
    moved: bool = False
    """The frontend goes on with them at another engine: answer nothing, and forget them."""


class Admit(msgspec.Struct, array_like=True, tag="admit"):
    """Tokenizer -> core: the request as ids."""

    request_id: int
    prompt_ids: bytes
    spec: RequestSpec
    sent_ns: int
    bad_word_ids: list[list[int]] = []
    embeds: EmbedsPrompt | None = None
    """Where the prompt has no ids: ``prompt_ids`` are then as many zeros as it has vectors."""


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """Tokenizer or core -> frontend: the request (every choice of it) ended with an error and produced nothing more."""

    request_id: int
    code: ErrorCode
    message: str
    param: str | None = None
    retry_s: int = 0
    """Seconds after which trying again makes sense; 0 says nothing of it."""


class Reclaim(msgspec.Struct, array_like=True, tag="reclaim"):
    """Frontend -> core: a client wants to go on reading a request whose frontend or connection is gone."""

    query_id: int
    frontend: int
    request_id: int
    """The first choice's."""
    key: bytes
    topology: int = 0
    """As in `RequestSpec`."""
    rename_to: int = 0
    """Keep the request under this first id, of the asker's, from now on; its client may still name it by older ones."""


class Reclaimed(msgspec.Struct, array_like=True, tag="reclaimed"):
    """Core -> frontend: the answer. To go on, submit the choices by their new ids, with ``adopts`` and what the client has."""

    query_id: int
    admit: Admit | None
    """The request as it was admitted; None when it is not known (any more)."""
    choices: list[tuple[int, bytes]] = []
    """Of each choice: its number, and its outputs so far (int32)."""
    core: int = 0
    """Index of the sender: what it keeps goes on there."""


class Live(msgspec.Struct, array_like=True, tag="live"):
    """A process tells another which requests it believes the two share: what lives there beside, nobody waits for.

    Frontend -> core: the choices that it waits for. Core -> detokenizer: those that it keeps there.
    """

    sender: WorkerId
    request_ids: bytes
    """int64[K]"""


class InFlightReport(msgspec.Struct, array_like=True, tag="handed"):
    """Frontend -> tokenizer -> core, on the path of the requests: choices that took it and that the frontend waits for.

    The tokenizer leaves out what it still has. Of the others, what the core does not know in two accounts in a row is lost.
    """

    sender: WorkerId
    tokenizer: int
    core: int
    request_ids: bytes
    """int64[K]"""
    attempts: bytes
    """int32[K]: the newest at each."""


class Unknown(msgspec.Struct, array_like=True, tag="unknown"):
    """Detokenizer -> core -> frontend, tokenizer -> frontend: of these choices (int64[K]), which you wait for, I know nothing.

    The frontend sends them again; those that it has cancelled have ended.
    """

    request_ids: bytes


# --- a request's way out: core -> detokenizer -> frontend ------------------------------------------------------


class Open(msgspec.Struct, array_like=True, gc=False):
    """Inside `Tokens`: the first the detokenizer hears of a request (one per choice)."""

    request_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_ids: bytes
    """Whole when ``echo`` or ``return_prompt_ids``; otherwise only the tail (`PROMPT_TAIL`), the context of the first output."""
    stop: list[str]
    include_stop: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    detokenize: bool
    echo: Echo
    return_prompt_ids: bool
    min_tokens: int
    arrival_ns: int
    scheduled_ns: int
    """When the first step that computes the request was planned."""
    output_ids: bytes = b""
    """int32: outputs that the core knows already (recovery): rebuild the text."""
    prompt_logprobs: bool = False
    """Whether `Tokens.prompt_logprobs` will have entries of it: none when the prompt is one token, which has none."""
    num_seen: int = 0
    """Of ``output_ids``, so many are with the frontend; the others are sent to it at once."""
    attempt: int = 0
    """Replaces whatever the detokenizer has of an older attempt at the request."""
    reading: OutputParsing | None = None
    """Which parsers read the text; None for none."""


PROMPT_TAIL = 16
"""Prompt tokens that `Open` carries as context."""


class Tokens(msgspec.Struct, array_like=True, tag="tokens", gc=False):
    """Core -> detokenizer, one per step: the new tokens of all requests that this detokenizer keeps."""

    step: int
    sent_ns: int
    opens: list[Open]
    request_ids: bytes
    """int64[K]"""
    first_indexes: bytes
    """int32[K]: output index of the row's first new token; what was already applied is dropped."""
    num_tokens: bytes
    """uint8[K]: new tokens of the row; 0 with a finish is an ending without a token."""
    token_ids: bytes
    """int32[sum of num_tokens]"""
    finishes: bytes
    """uint8[K]: `FinishReason`"""
    named_stops: bytes
    """int32[…]: rows whose last token ended them and was a stop token that the request named."""
    logprobs: list[TokenLogprobs] = []
    """``row`` is the row of this message."""
    prompt_logprobs: list[PromptLogprobs] = []
    """``row`` is the row of this message, which may have no tokens yet."""
    core_epoch: int = 0
    """Of the sender: tokens of a core that has a successor are dropped."""
    closed: bytes = b""
    """int64[…]: requests that another detokenizer keeps from now on; applied first."""
    core: int = 0
    """Index of the sender. Who opens a newer attempt at a request takes it from the core that had it."""


class StopHit(msgspec.Struct, array_like=True, tag="stop_hit", gc=False):
    """Detokenizer -> core: these requests ended in their text (a stop string). The client has been told already."""

    request_ids: bytes
    """int64[K]"""
    attempts: bytes = b""
    """int32[K]: the attempt whose text ended; the core goes on with a newer one."""


class Alternative(msgspec.Struct, array_like=True, gc=False):
    """One token and its log-probability, with its text."""

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
    """Where the token's text begins in the whole text, in characters (prompt included when echoed)."""


class Started(msgspec.Struct, array_like=True, gc=False):
    """Inside `Text`: the request has been computed for the first time."""

    request_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    arrival_ns: int
    scheduled_ns: int
    prompt_ids: bytes = b""
    prompt_text: str | None = None
    """When echoed."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    first_token: Alternative | None = None
    """The prompt's first, which has no probability (0 stands there): when echoed, and its log-probabilities were asked for."""


class Finish(msgspec.Struct, array_like=True, gc=False):
    """Inside `Text`: the request has ended; exactly one per choice."""

    request_id: int
    reason: FinishReason
    stop_reason: str | int | None
    num_output_tokens: int
    num_reasoning_tokens: int = 0
    """Of those, as the request's reading has it."""
    num_calls: int = 0
    """Calls of tools in the output."""


class RowLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Inside `Text`: log-probabilities of the tokens of one row."""

    row: int
    positions: list[PositionLogprobs]


class Text(msgspec.Struct, array_like=True, tag="text_out", gc=False):
    """Detokenizer -> frontend, one per step: what became of the requests this frontend owns.

    Apply in this order: ``started``, rows, ``finishes``.
    """

    step: int
    sent_ns: int
    tokens_sent_ns: int
    """When the core sent the tokens of this step."""
    started: list[Started]
    request_ids: list[int]
    deltas: list[str]
    """New text of each row, of all channels; empty while a character or a possible stop string is incomplete."""
    offsets: list[int]
    """Characters of output text (of all channels) before the delta: what was already seen is dropped."""
    first_indexes: list[int]
    """Output index of the row's first new token."""
    num_tokens: list[int]
    token_ids: bytes
    """int32[sum of num_tokens]"""
    finishes: list[Finish]
    logprobs: list[RowLogprobs] = []
    sender: tuple[int, int] = (0, 0)
    """Index and epoch of the detokenizer: text of one that has a successor is dropped."""
    spans: list[RowSpans] = []
    """Of the rows whose request has a `OutputParsing`; the text of other rows is content."""


# --- small questions ------------------------------------------------------------------------------------------


class TokenizeQuery(msgspec.Struct, array_like=True, tag="tokenize"):
    """Frontend -> tokenizer: only encode."""

    query_id: int
    frontend: int
    prompt: TextPrompt | ChatPrompt
    return_token_strs: bool = False
    until_ns: int | None = None
    """When nobody waits for the answer any more (`time.monotonic_ns`); None: never."""


class Tokenized(msgspec.Struct, array_like=True, tag="tokenized"):
    """Tokenizer -> frontend: the answer, or an error."""

    query_id: int
    token_ids: bytes
    token_strs: list[str] | None = None
    error: Failed | None = None


class DetokenizeQuery(msgspec.Struct, array_like=True, tag="detokenize"):
    """Frontend -> detokenizer: only decode."""

    query_id: int
    frontend: int
    token_ids: bytes
    opened: Open | None = None
    """Decode them as the whole output of a request that begins so; None: as a text, special tokens included."""
    is_cut: bool = False  # whether a limit ended that output, not the model


class Detokenized(msgspec.Struct, array_like=True, tag="detokenized"):
    """Detokenizer -> frontend: the answer, or an error."""

    query_id: int
    text: str
    error: Failed | None = None
    spans: list[Span] = []
    """What the text is made of, where a `OutputParsing` was asked for."""
    num_reasoning_tokens: int = 0
    num_calls: int = 0


# --- supervision ----------------------------------------------------------------------------------------------
