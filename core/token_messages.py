"""Builders of the messages that report tokens, opened and ended requests to detokenizers."""

from __future__ import annotations

from array import array

import msgspec

from quintet.core.requests.request import Request
from quintet.wire.codec import pack_i32
from quintet.wire.messages import PROMPT_TAIL, Failed, FinishReason, Open, Tokens
from quintet.wire.pooling import Pooled
from quintet.wire.step import PromptLogprobs, TokenLogprobs


class StepMessages(msgspec.Struct):
    """Messages to send, in this order."""

    tokens: list[tuple[int, Tokens]] = []
    """Pairs of detokenizer index and message."""
    failed: list[Failed] = []
    pooled: list[Pooled] = []
    unknown: list[int] = []
    """Choices that a frontend waits for and the core does not know."""

    def add(self, later: StepMessages) -> None:
        """Append the messages of a later change."""
        self.tokens += later.tokens
        self.failed += later.failed
        self.pooled += later.pooled
        self.unknown += later.unknown


Ending = tuple[FinishReason, bool]
"""Finish reason, and True for a stop token that the request named."""


def ending_of(request: Request) -> Ending | None:
    """Return the finish reason caused by the newest output; None when the request continues."""
    if request.num_outputs > request.spec.params.min_tokens:
        is_named = request.stops.get(request.tokens[-1])
        if is_named is not None:
            return FinishReason.STOP, is_named
        watch = request.repetition
        if watch is not None and watch.has_repeated(request.tokens, request.num_prompt):
            return FinishReason.REPETITION, False
    return (FinishReason.LENGTH, False) if len(request.tokens) >= request.limit else None


class TokensBuilder(msgspec.Struct):
    """Columns of one `Tokens` message. Rows are appended in order; most have one token and no finish."""

    opens: list[Open] = []
    closed: list[int] = []
    request_ids: list[int] = []
    first_indexes: list[int] = []
    token_ids: list[int] = []
    num_tokens: dict[int, int] = {}
    """Row -> token count, for rows without exactly one token."""
    num_drafts: dict[int, int] = {}
    """Row -> draft tokens that its step verified."""
    finishes: dict[int, Ending] = {}
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []

    def add_empty(self, request: Request) -> int:
        """Add a row without a token and return its number."""
        row = len(self.request_ids)
        self.request_ids.append(request.request_id)
        self.first_indexes.append(request.num_outputs)
        self.num_tokens[row] = 0
        return row

    def build(self, step: int, now_ns: int) -> Tokens:
        num_rows, finishes = len(self.request_ids), self.finishes
        return Tokens(
            step=step,
            sent_ns=now_ns,
            opens=self.opens,
            request_ids=array("q", self.request_ids).tobytes(),
            first_indexes=array("i", self.first_indexes).tobytes(),
            num_tokens=_with_values(b"\1" * num_rows, self.num_tokens),
            token_ids=array("i", self.token_ids).tobytes(),
            finishes=_with_values(bytes(num_rows), {row: reason for row, (reason, _) in finishes.items()}),
            named_stops=pack_i32(row for row, (_, is_named) in finishes.items() if is_named),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            closed=array("q", self.closed).tobytes(),
            num_drafts=_with_values(bytes(num_rows), self.num_drafts) if self.num_drafts else b"",
        )


def _with_values(column: bytes, values: dict[int, int]) -> bytes:
    """Return a column of one byte a row, with these values instead."""
    if not values:
        return column
    changed = bytearray(column)
    for row, value in values.items():
        changed[row] = value
    return bytes(changed)


class TokensBuilders(msgspec.Struct):
    """One `TokensBuilder` per detokenizer that gets a message."""

    builders: dict[int, TokensBuilder] = {}
    failed: list[Failed] = []
    pooled: list[Pooled] = []
    unknown: list[int] = []

    def builder_for(self, request: Request, now_ns: int) -> TokensBuilder:
        """Return the builder of the request's detokenizer, after opening the request there."""
        builder = self._builder(request.detokenizer)
        if not request.delivery.opened:
            request.delivery.opened = True
            builder.opens.append(opening(request, now_ns))
        return builder

    def close(self, request: Request) -> None:
        """Close the request at its detokenizer without reporting to the frontend."""
        if request.delivery.opened:
            self._builder(request.detokenizer).closed.append(request.request_id)
            request.delivery.opened = False

    def _builder(self, detokenizer: int) -> TokensBuilder:
        builder = self.builders.get(detokenizer)
        if builder is None:
            builder = self.builders[detokenizer] = TokensBuilder()
        return builder

    def end(self, request: Request, reason: FinishReason, now_ns: int) -> None:
        """Report an ending without a token."""
        builder = self.builder_for(request, now_ns)
        builder.finishes[builder.add_empty(request)] = (reason, False)

    def end_with_last(self, request: Request, ending: Ending, now_ns: int) -> None:
        """Report a request that arrived with all its outputs: its last token is sent as new, because the text ends with it."""
        last = request.tokens.pop()
        request.delivery.num_seen = min(request.delivery.num_seen, request.num_outputs)
        builder = self.builder_for(request, now_ns)
        builder.finishes[len(builder.request_ids)] = ending
        builder.request_ids.append(request.request_id)
        builder.first_indexes.append(request.num_outputs)
        builder.token_ids.append(last)
        request.tokens.append(last)

    def effects(self, step: int, now_ns: int) -> StepMessages:
        tokens = [(index, builder.build(step, now_ns)) for index, builder in self.builders.items()]
        return StepMessages(tokens, self.failed, self.pooled, self.unknown)


def opening(request: Request, now_ns: int) -> Open:
    """Return the `Open` message of a request, with its outputs so far."""
    params, tokens, num_prompt = request.spec.params, request.tokens, request.num_prompt
    whole = request.spec.echo or request.spec.return_prompt_ids
    begin = 0 if whole else max(0, num_prompt - PROMPT_TAIL)
    if request.embeds:
        begin = max(begin, request.embeds[-1].end)  # embeddings have no text
    return Open(
        request_id=request.request_id,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=request.stats.num_cached,
        prompt_ids=pack_i32(tokens[begin:num_prompt]),
        **params.text_params,
        echo=request.spec.echo,
        return_prompt_ids=request.spec.return_prompt_ids,
        arrival_ns=request.spec.arrival_ns,
        scheduled_ns=now_ns if request.stats.scheduled_ns is None else request.stats.scheduled_ns,
        output_ids=pack_i32(tokens[num_prompt:]),
        prompt_logprobs=params.prompt_logprobs is not None,
        num_seen=request.delivery.num_seen,
        attempt=request.delivery.attempt,
        parsing=request.spec.parsing,
    )
