"""Output types of the Python API, with vLLM's names and shapes, so that existing scripts work unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quintet.frontend.streams import Batch, OutputDelta, Stream
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import RequestError
from quintet.wire.messages import FinishReason, PositionLogprobs, Started
from quintet.wire.params import OutputKind


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


Position = dict[int, Logprob]
"""Token id -> log-probability: the sampled token first, then the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` outputs."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the tokens, if log-probabilities were requested."""
    logprobs: list[Position] | None = None
    """One per token, if requested."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error``; None while it is running."""
    stop_reason: str | int | None = None
    """Stop string or stop token that matched; None for the end-of-sequence token."""

    @property
    def finished(self) -> bool:
        """True if the output has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Event times in seconds of ``time.monotonic()``; None for events that have not happened."""

    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None


@dataclass(slots=True)
class RequestOutput:
    """Outputs of one prompt so far."""

    request_id: str
    prompt: str | None
    """Prompt text; None for token ids and conversations."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[Position | None] | None
    """One per prompt token (None for the first), if requested."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Prompt tokens with a prefix cache hit."""
    error: RequestError | None = None
    """Error of a failed request, with ``errors="return"``."""


@dataclass(slots=True)
class _PartialChoice:
    """Accumulated deltas of one choice."""

    output: CompletionOutput
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Position] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class Assembler:
    """Assembles `RequestOutput` from the batches of one stream."""

    def __init__(self, request_id: str, prompt: str | None, stream: Stream) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._stream = stream
        self._kind = stream.submit.spec.params.output_kind
        self._has_logprobs = stream.submit.spec.params.logprobs is not None
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: list[Position | None] | None = None
        self._num_cached = 0
        self._choices = [
            _PartialChoice(CompletionOutput(i, "", [])) for i in range(stream.submit.spec.params.n)
        ]

    def start(self, started: Started) -> None:
        self._prompt_ids = list(unpack_i32(started.prompt_ids))
        self._num_cached = started.num_cached_tokens
        if started.prompt_logprobs is not None:
            self._prompt_logprobs = [None if p is None else read_position(p) for p in started.prompt_logprobs]

    def add(self, batch: Batch) -> RequestOutput | None:
        """Add a batch; return the next output of the requested kind, or None. A failed request always has an output."""
        if batch.started is not None:
            self.start(batch.started)
        output = self._add_deltas(batch.deltas)
        return output if batch.error is None else self.failed(batch.error)

    def _add_deltas(self, deltas: Sequence[OutputDelta]) -> RequestOutput | None:
        cumulative = self._kind is not OutputKind.DELTA
        for delta in deltas:
            self._append(self._choices[delta.choice], delta, cumulative)
        finished = self._stream.ended
        if self._kind is OutputKind.FINAL_ONLY:
            return self._output([c.output for c in self._choices], True) if finished else None
        if cumulative:
            return self._output([_copy(c.output) for c in self._choices], finished) if deltas else None
        changed = sorted(
            (self._choices[delta.choice].output for delta in deltas), key=lambda output: output.index
        )
        return self._output([_copy(output) for output in changed], finished) if changed else None

    def failed(self, error: RequestError) -> RequestOutput:
        """Return the output of a request that ended with an error."""
        for choice in self._choices:
            choice.output.finish_reason = choice.output.finish_reason or "error"
        output = self._output([c.output for c in self._choices], True)
        output.error = error
        return output

    def _append(self, choice: _PartialChoice, delta: OutputDelta, cumulative: bool) -> None:
        positions = [read_position(p) for p in delta.logprobs]
        if self._has_logprobs:
            choice.cumulative_logprob += sum(p.chosen.logprob for p in delta.logprobs)
        output = choice.output
        if cumulative:
            choice.text += delta.text
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs += positions
            output.text, output.token_ids, logprobs = choice.text, choice.token_ids, choice.logprobs
        else:
            output.text, output.token_ids, logprobs = delta.text, list(delta.token_ids), positions
        if self._has_logprobs:
            output.logprobs, output.cumulative_logprob = logprobs, choice.cumulative_logprob
        if delta.finish is not None:
            output.finish_reason = FinishReason(delta.finish.reason).name.lower()
            output.stop_reason = delta.finish.stop_reason

    def _output(self, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        stream = self._stream
        started, first_ns = stream.started, stream.first_token_ns
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=RequestMetrics(
                arrival_s=stream.submit.spec.arrival_ns * 1e-9,
                scheduled_s=None if started is None else started.scheduled_ns * 1e-9,
                first_token_s=first_ns * 1e-9 if first_ns else None,
            ),
            num_cached_tokens=self._num_cached,
        )


def _copy(output: CompletionOutput) -> CompletionOutput:
    """Return a copy that later deltas do not change."""
    return CompletionOutput(
        output.index,
        output.text,
        list(output.token_ids),
        output.cumulative_logprob,
        None if output.logprobs is None else list(output.logprobs),
        output.finish_reason,
        output.stop_reason,
    )


def read_position(position: PositionLogprobs) -> Position:
    entries = {position.chosen.token_id: position.chosen} | {a.token_id: a for a in position.top}
    return {token_id: Logprob(a.logprob, a.rank, a.token) for token_id, a in entries.items()}
