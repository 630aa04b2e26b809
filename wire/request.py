"""Request specification: filled by the frontend, completed by the tokenizer (grammar, budgets), scheduled by the core."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from quintet.wire.config import ModelConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Count, Id, SlotIndex
from quintet.wire.params import MAX_CHOICES, SamplingParams
from quintet.wire.pooling import PoolingType

MAX_NAME_CHARS = 64
"""Maximum length of a parser's name."""

Choice = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHOICES)]

MAX_SCHEMAS_BYTES = 1 << 18
"""Maximum size of `OutputParsing.schemas`: a step sends it for every request that starts."""


class ResumeToken(msgspec.Struct, array_like=True):
    """Data with which any frontend can resume a request after its frontend or client was lost."""

    key: bytes
    """The client's secret: it authorizes reading the request."""
    answer: bytes
    """Response format, parsed only by the frontends' API modules."""


class OutputParsing(msgspec.Struct, array_like=True):
    """Output parsing by the detokenizer: parsers and their arguments."""

    reasoning: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    """Name of a reasoning parser; "" for none."""
    tools: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    """Name of a tool parser; "" for none."""
    schemas: Annotated[bytes, msgspec.Meta(max_length=MAX_SCHEMAS_BYTES)] = b""
    """JSON of the request's tools, for parsers without argument types."""
    requires_calls: bool = False
    """The answer must be tool calls (enforced by `SamplingParams`)."""
    prompt_end: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    """Last mark of reasoning before the output of a continued message; "" to find it at the prompt's end."""


class Echo(IntEnum):
    """Echo of the prompt at the start of the text, by its special tokens."""

    NONE = 0
    PLAIN = 1
    """Special tokens as in the output: skipped where the output skips them, because the tokenizer may have added them."""
    WHOLE = 2
    """All special tokens: they come from the client."""


MAX_PEER_CHARS = 300
"""Maximum length of `KvTransfer.peer`."""


class KvTransfer(msgspec.Struct, array_like=True):
    """KV transfer of a request from or to other servers (``docs/disaggregation.md``)."""

    offers: bool = False
    """Offer the prompt's blocks to other servers when it has ended."""
    peer: str = ""
    """``host:port`` from which the prompt's blocks are fetched; "" for none."""
    num_blocks: int = 0
    """Number of the prompt's blocks, from the first on, that the peer offers."""


class RequestSpec(msgspec.Struct, array_like=True):
    """Inside `Submit` and `Admit`: all of a request except prompt and routing.

    The tokenizer replaces ``params`` (grammar, thinking budget, stop ids).
    Fields of the attempt (``choice`` … ``attempt``, ``topology``) change between attempts: see `Submit`.
    """

    params: SamplingParams
    """Checked. `LiveRequests.submit` adds a seed."""
    arrival_ns: int = 0
    detokenizer: SlotIndex = 0
    """Index of the request's detokenizer."""
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    """Lower runs first, under the priority policy."""
    cache_salt: str = ""
    """Prefix cache entries are shared only between requests of the same salt."""
    echo: Echo = Echo.NONE
    return_prompt_ids: bool = False
    choice: Choice = 0
    """Index of this request's first choice among the choices of the original request."""
    output_ids: bytes = b""
    """int32: outputs that the frontend has; they are not sent again."""
    attempt: Count = 0
    deadline_ns: Id = 0
    """Latest end requested by the client; 0 for none."""
    resume_token: ResumeToken | None = None
    """Set for resumable requests: they survive the loss of their frontend or client."""
    resumes: bool = False
    """Resume the request that the core retains under this id (`Resume.rename_to`)."""
    topology: int = 0
    """Version of the sender's topology. A receiver with an older one waits for it, so that answers reach living processes."""
    parsing: OutputParsing | None = None
    """Output parsing; None for plain text."""
    replays: bool = False
    """The client has no text of ``output_ids`` yet: send it as if they had just been drawn."""
    kv_transfer: KvTransfer | None = None
    """None without KV transfer."""
    pooling: PoolingType | None = None
    """Pool the prompt's hidden states and generate nothing (``max_tokens`` is ignored); None to generate."""
    adapter: bytes = b""
    """Digest of the LoRA adapter; empty without one."""

    @property
    def num_seen(self) -> int:
        """Number of outputs that need not be sent again."""
        return 0 if self.replays else len(self.output_ids) // 4


def model_names(config: ModelConfig) -> list[str]:
    """Return the names that requests may give: of the model, then of its adapters."""
    return [*config.served_names, *(adapter.name for adapter in config.adapters)]


def adapter_digest(config: ModelConfig, name: str | None) -> bytes:
    """Return `RequestSpec.adapter` of requests with this model name."""
    return next((adapter.digest for adapter in config.adapters if adapter.name == name), b"")


def name_in_responses(config: ModelConfig, name: str | None) -> str:
    """Return the requested adapter's name, or the first one of the model."""
    return name if name and adapter_digest(config, name) else config.served_names[0]


def check_length(
    num_prompt: int,
    limit: int,
    field: str = "prompt",
    max_tokens: int | None = None,
    *,
    is_least: bool = False,
    cause: str = "",
) -> None:
    """Raise `RequestError` unless a prompt and its output fit a context of ``limit`` tokens.

    field: name of the prompt in the client's request. max_tokens: requested output tokens; None: one must fit. is_least:
    the prompt is not tokenized yet and has ``num_prompt`` tokens or more. cause: reason of a limit below the model's.
    """
    num_new = 1 if max_tokens is None else max_tokens
    if num_prompt + num_new <= limit:
        return
    at_least = "at least " if is_least else ""
    raise RequestError(
        ErrorCode.TOO_LONG,
        f"This model's maximum context length is {limit} tokens{cause}. However, you requested {at_least}{num_prompt + num_new} "
        f"tokens ({at_least}{num_prompt} in the {field}, {num_new} in the completion). Please reduce the length of the {field} "
        "or completion.",
        field if num_prompt >= limit else "max_tokens",
    )


def reserved_output_tokens(max_tokens: int | None, clamp_max_tokens: bool, max_model_len: int) -> int:
    """Return the number of context tokens reserved for the output when a prompt is truncated."""
    room = 1 if max_tokens is None else max_tokens
    if clamp_max_tokens and 2 * room > max_model_len:
        return 1  # a default must not take more of the context than it leaves to the prompt
    return room
