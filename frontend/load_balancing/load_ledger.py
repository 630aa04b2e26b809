"""Ledger of outstanding work: where each live request runs, and the tokens that it still owes.

Admission, load balancing and the choice of processes read it. It counts only this process's own requests and queries, so
that a decision needs no message. O(1) per event of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from quintet.frontend.load_balancing.load_balancer import MEAN_OVER, RUNNING_TOKENS, EngineChoice
from quintet.frontend.load_balancing.workers import Workers
from quintet.frontend.streams import Stream
from quintet.wire.codec import ID_BYTES
from quintet.wire.config import EngineConfig
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.ids import Role
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quintet.wire.params import SamplingParams

BYTES_PER_TOKEN = 4
"""Mean bytes per token of text over languages and vocabularies. The exact count in `Started` is too late for admission."""


def embeds_bytes(prompt: Prompt) -> int:
    """Return the bytes of a prompt's embeddings; 0 for text or ids."""
    return len(prompt.values) if isinstance(prompt, EmbedsPrompt) else 0


def num_prompt_tokens(prompt: Prompt) -> int:
    """Return the tokens of a prompt, estimated for text."""
    match prompt:
        case TextPrompt():
            num_bytes = _num_bytes(prompt.text) + (_num_bytes(prompt.suffix) if prompt.suffix else 0)
        case ChatPrompt():
            num_bytes = len(prompt.messages) + len(prompt.tools) + len(prompt.template_kwargs)
        case TokenPrompt():
            return len(prompt.token_ids) // 4
        case EmbedsPrompt():
            return prompt.span.num_tokens
    return -(-num_bytes // BYTES_PER_TOKEN)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


@dataclass(slots=True, eq=False)
class RequestLoad:
    """Outstanding work of one live request."""

    num_open: int
    """Choices that have not ended."""
    num_prompt: int
    """Prompt tokens; estimated for text."""
    num_unstarted: int
    """Prompt tokens until its first prefill has ended, then 0."""
    num_outputs: int
    """Expected output tokens of all choices."""
    num_prior_outputs: int
    """Output tokens on arrival."""
    embeds_bytes: int
    tokenizer: int | None = None
    """Tokenizer that encodes it."""
    num_placed: int = 0
    """Choices counted in the load of its core and detokenizer."""
    num_queued: int = 0
    """Prompt tokens counted in its engine's queue."""
    num_tokens_ahead: int = 0
    """Tokens queued at its engine at dispatch."""
    num_kv_tokens: int = 0
    """KV cache tokens counted for it at its engine."""
    started_attempt: int | None = None
    """Last attempt that finished prefill."""


@dataclass(slots=True, eq=False)
class EngineTokens:
    """Outstanding tokens at one engine."""

    num_queued: int = 0
    """Prompt tokens of its requests before prefill."""
    num_kv: int = 0
    """KV cache tokens of its requests, present and expected."""


class LoadLedger:
    """Outstanding work of this frontend: per request, per process, per engine, and in total."""

    def __init__(self, workers: Workers, config: EngineConfig) -> None:
        self.workers = workers
        self._max_model_len = config.model.max_model_len
        self._kv, self._step_tokens = config.model.kv, config.scheduler.max_num_batched_tokens
        self._is_plain = [group.kind for group in self._kv.groups] == ["full"]
        """True if each token takes the same KV memory."""
        self._requests: dict[int, RequestLoad] = {}
        self._processes: dict[tuple[Role, int], int] = {}
        """Queries, prompts of a tokenizer, and choices of a core or detokenizer."""
        self._engines: dict[int, EngineTokens] = {}
        self.num_open_choices = 0
        """Choices that have not ended."""
        self.num_ended = 0
        """Requests ended since start."""
        self.num_received = 0
        """Output tokens received since start."""
        self.num_added = 0
        """Sum of all tokens owed on arrival: less `num_pending`, the tokens that left."""
        self.embeds_bytes = 0
        """Bytes of prompt embeddings of live requests."""
        self._num_expected = 0
        """Prompt tokens before prefill and expected output tokens of live requests."""
        self._num_released = self._num_ended_choices = 0
        """Output tokens and choices of ended requests."""
        self._num_left = 0
        self._mean_outputs = 0.0
        """Running mean of output tokens per choice, over requests that ended at an engine."""

    # --- questions ---

    def of(self, stream: Stream) -> RequestLoad:
        """Return the outstanding work of a live request."""
        return self._requests[stream.request_id]

    def engine(self, index: int) -> EngineTokens:
        """Return the outstanding tokens at an engine."""
        return self._engines.setdefault(index, EngineTokens())

    def at(self, role: Role, index: int) -> int:
        """Return the outstanding work at a process."""
        return self._processes.get((role, index), 0)

    def pick(self, role: Role) -> int | None:
        """Return the index of the least loaded available worker, or None.

        Each frontend breaks ties differently, so that they do not all start with worker 0.
        """
        indexes, me = self.workers.available(role), self.workers.me.index
        if len(indexes) < 2:
            return indexes[0] if indexes else None
        return min(indexes, key=lambda index: (self.at(role, index), (index - me) % len(indexes)))

    @property
    def num_pending(self) -> int:
        """Prompt tokens not yet prefilled, and output tokens still allowed, of all live requests."""
        return max(0, self._num_expected - (self.num_received - self._num_released))

    def cost(self, prompt: Prompt, params: SamplingParams) -> int:
        """Return the pending tokens that a request would add."""
        return num_prompt_tokens(prompt) + self._num_outputs(params)

    def _num_outputs(self, params: SamplingParams) -> int:
        """Return the expected output tokens: max_tokens, or else the mean output so far."""
        if params.max_tokens is not None:
            return params.n * min(params.max_tokens, self._max_model_len)
        return params.n * self._num_released // max(1, self._num_ended_choices)

    def num_kv_tokens(self, stream: Stream) -> int:
        """Return the KV cache tokens that a request takes, given the mean output length."""
        most = stream.submit.spec.params.max_tokens
        num_outputs = self._mean_outputs if most is None else min(self._mean_outputs, most)
        kv, num_tokens = self._kv, self.of(stream).num_prompt + stream.num_open * int(num_outputs)
        if self._is_plain:
            return num_tokens
        return kv.most_blocks(num_tokens, self._step_tokens) * kv.block_size // max(1, len(kv.groups))

    def is_prefilled(self, stream: Stream) -> bool:
        """True if the current attempt of a request has finished prefill."""
        return self.of(stream).started_attempt == stream.attempt

    # --- events ---

    def add(self, role: Role, index: int, amount: int) -> None:
        """Add work given to a process; negative to remove it."""
        self._processes[role, index] = self.at(role, index) + amount

    def open(self, stream: Stream) -> None:
        """Add a request that is about to be sent."""
        prompt, num_prior = stream.submit.prompt, stream.num_output_tokens
        num_prompt, num_outputs = num_prompt_tokens(prompt), self._num_outputs(stream.submit.spec.params)
        num_unstarted = num_prompt if stream.started is None else 0
        load = RequestLoad(
            stream.num_open, num_prompt, num_unstarted, num_outputs, num_prior, embeds_bytes(prompt)
        )
        self._requests[stream.request_id] = load
        self._num_expected += num_unstarted + num_outputs
        self.num_added += num_unstarted + num_outputs
        self.num_open_choices += load.num_open
        self.embeds_bytes += load.embeds_bytes

    def place(self, stream: Stream, choice: EngineChoice) -> None:
        """Add a request to the load of the engine and the detokenizer it was sent to."""
        load, engine = self.of(stream), self.engine(choice.index)
        load.num_tokens_ahead = engine.num_queued + RUNNING_TOKENS * self.at(Role.CORE, choice.index)
        load.num_kv_tokens = max(0, self.num_kv_tokens(stream) - choice.num_cached)
        engine.num_kv += load.num_kv_tokens
        if load.started_attempt != stream.attempt:
            # Prior output is prefilled too.
            num_prior_outputs = len(stream.submit.spec.output_ids) // ID_BYTES
            num_tokens = load.num_prompt + max(stream.num_open_tokens, num_prior_outputs)
            load.num_queued = max(0, num_tokens - choice.num_cached)
        engine.num_queued += load.num_queued
        load.num_placed = stream.num_open
        self._add_placed(stream, load.num_placed)

    def _add_placed(self, stream: Stream, amount: int) -> None:
        self.add(Role.CORE, stream.submit.core, amount)
        self.add(Role.DETOKENIZER, stream.submit.spec.detokenizer, amount)

    def encode(self, stream: Stream, tokenizer: int) -> None:
        """Add a request to the load of a tokenizer."""
        self.of(stream).tokenizer = tokenizer
        self.add(Role.TOKENIZER, tokenizer, 1)

    def end_encoding(self, stream: Stream) -> None:
        """Remove a request from the load of its tokenizer."""
        load = self.of(stream)
        if load.tokenizer is not None:
            self.add(Role.TOKENIZER, load.tokenizer, -1)
            load.tokenizer = None

    def start(self, stream: Stream) -> None:
        """Note the end of prefill. In a later attempt the outputs so far were prefilled with the prompt."""
        self.end_encoding(stream)
        load = self.of(stream)
        load.started_attempt = stream.attempt
        self._num_expected -= load.num_unstarted
        load.num_unstarted = 0
        self._dequeue(stream, load)

    def _dequeue(self, stream: Stream, load: RequestLoad) -> None:
        self.engine(stream.submit.core).num_queued -= load.num_queued
        load.num_queued = 0

    def remove(self, stream: Stream) -> None:
        """Remove a request from the load of its processes: it ends, or is sent elsewhere."""
        self.end_encoding(stream)
        load = self.of(stream)
        self._dequeue(stream, load)
        self.engine(stream.submit.core).num_kv -= load.num_kv_tokens
        load.num_kv_tokens = 0
        self._add_placed(stream, -load.num_placed)
        if stream.ended:
            self._num_left += 1
            num_outputs = stream.num_output_tokens / len(stream.choices)
            self._mean_outputs += (num_outputs - self._mean_outputs) / min(self._num_left, MEAN_OVER)

    def end_choice(self, stream: Stream) -> None:
        """Remove a choice that ended."""
        self.of(stream).num_open -= 1
        self.num_open_choices -= 1

    def close(self, stream: Stream) -> None:
        """Remove a request that ended."""
        load = self._remove(stream)
        self.num_ended += 1
        self._num_released += stream.num_output_tokens - load.num_prior_outputs
        self._num_ended_choices += len(stream.choices)

    def reject(self, stream: Stream) -> None:
        """Remove a request that could not be sent."""
        load = self._remove(stream)
        self.num_added -= load.num_unstarted + load.num_outputs

    def _remove(self, stream: Stream) -> RequestLoad:
        load = self._requests.pop(stream.request_id)
        self._num_expected -= load.num_unstarted + load.num_outputs
        self.num_open_choices -= load.num_open
        self.embeds_bytes -= load.embeds_bytes
        return load
