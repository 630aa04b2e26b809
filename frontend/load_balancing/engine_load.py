"""Load of each engine from this frontend, and the engine choice for its requests.

Feeds `quintet.frontend.load_balancing.load_balancer.choose`. Uses only this process's own dispatches and their results: a
choice needs no message.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quintet.frontend.load_balancing.engine_speed import EngineSpeeds, LinearFit
from quintet.frontend.load_balancing.load_balancer import (
    RUNNING_TOKENS,
    Candidate,
    EngineChoice,
    Workers,
    choose,
)
from quintet.frontend.load_balancing.prefix_affinity import (
    MAX_HASHES,
    PIECE_TOKENS,
    PrefixAffinity,
    hash_prefixes,
)
from quintet.frontend.streams import Stream
from quintet.wire.columns import ID_BYTES
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Started

MEAN_OVER = 256
"""Requests in the running means, about; without a quarter of them a mean is unknown."""


class EngineLoad:
    """Load of one engine."""

    def __init__(self, max_hashes: int, usual: LinearFit) -> None:
        self.num_queued = 0
        """Prompt tokens of its requests before prefill."""
        self.num_kv_tokens = 0
        """KV cache tokens of its requests, present and expected."""
        self.prefixes = PrefixAffinity(max_hashes)
        self.speed = EngineSpeeds(usual)


class EngineLoads:
    """Loads of all engines, as this frontend sees them."""

    def __init__(
        self, slots: Workers, config: EngineConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slots, self._clock = slots, clock
        self._kv, self._kv_tokens = config.model.kv, _kv_tokens(config)
        self._step_tokens = config.scheduler.max_num_batched_tokens
        self._speed_fit = LinearFit()
        self._num_ended = 0
        self._mean_outputs = 0.0
        """Running mean of output tokens per choice."""
        shares = config.cache.enable_prefix_caching
        self._policy = config.frontend.routing if shares or config.frontend.routing != "prefix" else "load"
        self._loads: dict[int, EngineLoad] = {}
        self._max_names = _max_names(config)
        self._num_chosen = 0
        self._mean_new_tokens = 0.0
        """Running mean of uncached prompt tokens."""

    def choose(self, stream: Stream) -> EngineChoice | None:
        """Choose the engine of a request; None without an engine. A pinned request goes to its engine while that lives."""
        pinned = stream.pinned_core
        if pinned is not None and self._slots.epoch(Role.CORE, pinned):
            return EngineChoice(pinned, "has the request")
        indexes = self._slots.engines()
        if len(indexes) < 2:
            return EngineChoice(indexes[0], "only engine") if indexes else None
        self._num_chosen += 1
        submit = stream.submit
        names = stream.prefix_hashes = hash_prefixes(submit.prompt, submit.spec.cache_salt)
        readable = names if submit.spec.params.reads_prefix_cache else []
        kv_tokens = self._kv_tokens // max(1, self._slots.num_frontends)
        engines = [self._engine(index, readable, kv_tokens) for index in indexes]
        session = submit.session or (str(names[0]) if names else "")
        turn, num_tokens = self._slots.me.index + self._num_chosen, stream.num_prompt
        usual = max(PIECE_TOKENS, self._mean_new_tokens) if self._num_chosen > MEAN_OVER // 4 else 0.0
        choice = choose(engines, self._policy, turn, session, num_tokens, usual, self._kv_tokens_of(stream))
        self._mean_new_tokens += (max(0, num_tokens - choice.num_cached) - self._mean_new_tokens) / min(
            self._num_chosen, MEAN_OVER
        )
        return choice

    def _engine(self, index: int, names: list[int], kv_tokens: int) -> Candidate:
        load = self._load_of(index)
        num_known, used = load.prefixes.find(names)
        return Candidate(
            index,
            load.num_queued,
            self._slots.load(Role.CORE, index),
            PIECE_TOKENS * num_known,
            used,
            slowness=load.speed.slowness(self._clock()),
            kv_free=kv_tokens - load.num_kv_tokens if kv_tokens else None,
            is_full=load.prefixes.is_full,
        )

    def _kv_tokens_of(self, stream: Stream) -> int:
        """Return the KV cache tokens that a request takes, given the mean output length."""
        most = stream.submit.spec.params.max_tokens
        num_outputs = self._mean_outputs if most is None else min(self._mean_outputs, most)
        kv, num_tokens = self._kv, stream.num_prompt + stream.num_open * int(num_outputs)
        return kv.most_blocks(num_tokens, self._step_tokens) * kv.block_size // max(1, len(kv.groups))

    def enter(self, stream: Stream, choice: EngineChoice) -> None:
        """Add a request that was sent to this engine."""
        load = self._load_of(choice.index)
        stream.choice = choice
        num_open = self._slots.load(Role.CORE, choice.index)
        stream.num_tokens_ahead = load.num_queued + RUNNING_TOKENS * num_open
        stream.num_kv_tokens = max(0, self._kv_tokens_of(stream) - choice.num_cached)
        load.num_kv_tokens += stream.num_kv_tokens
        if stream.started_attempt != stream.attempt:
            # Prior output is prefilled too.
            num_prior_outputs = len(stream.submit.spec.output_ids) // ID_BYTES
            num_tokens = stream.num_prompt + max(stream.num_open_tokens, num_prior_outputs)
            stream.num_queued = max(0, num_tokens - choice.num_cached)
        load.num_queued += stream.num_queued
        if stream.prefix_hashes:
            load.prefixes.note(stream.prefix_hashes)
        self._slots.add_load(Role.CORE, choice.index, stream.num_placed)

    def begin(self, stream: Stream, started: Started) -> None:
        """Note the end of prefill. In a later attempt the outputs so far were prefilled with the prompt."""
        choice, stream.started_attempt = stream.choice, stream.attempt
        if choice is None:
            return
        self._dequeue(stream, choice)
        is_new = not (stream.attempt or stream.num_open_tokens or stream.submit.spec.output_ids)
        if is_new and stream.started is started:
            num_tokens_ahead = stream.num_tokens_ahead + started.num_prompt_tokens - started.num_cached_tokens
            now_s = self._clock()
            self._load_of(choice.index).speed.note(
                num_tokens_ahead, now_s - 1e-9 * stream.submit.sent_ns, now_s
            )
        if choice.num_cached and not stream.attempt and started.num_cached_tokens < choice.num_cached // 2:
            self._load_of(choice.index).prefixes.miss(choice.used)

    def leave(self, stream: Stream) -> None:
        """Remove a request: it ends, or moves to another engine."""
        choice = stream.choice
        assert choice is not None
        self._dequeue(stream, choice)
        self._load_of(choice.index).num_kv_tokens -= stream.num_kv_tokens
        stream.num_kv_tokens = 0
        if stream.ended:
            num_outputs = stream.num_output_tokens / len(stream.choices)
            self._num_ended += 1
            self._mean_outputs += (num_outputs - self._mean_outputs) / min(self._num_ended, MEAN_OVER)
        self._slots.add_load(Role.CORE, choice.index, -stream.num_placed)

    def _dequeue(self, stream: Stream, choice: EngineChoice) -> None:
        self._load_of(choice.index).num_queued -= stream.num_queued
        stream.num_queued = 0

    def lose(self, worker: WorkerId) -> None:
        """Note the loss of a core or an executor, and with it of the engine's cache."""
        load = self._load_of(worker.index)
        load.prefixes.clear()
        load.speed.forget()

    def _load_of(self, index: int) -> EngineLoad:
        load = self._loads.get(index)
        if load is None:
            load = self._loads[index] = EngineLoad(self._max_names, self._speed_fit)
        return load

    def can_leave(self, stream: Stream) -> bool:
        """True if a request of a lost executor can move to another engine now.

        False if its executor died before too, and it has generated no more since: it may cause the crash. Its core then waits
        for the next executor and isolates it.
        """
        return not stream.is_suspect and any(
            index != stream.submit.core for index in self._slots.ready_engines()
        )


def _max_names(config: EngineConfig) -> int:
    """Return the number of prefix pieces that fit into an engine's KV cache."""
    return min(MAX_HASHES, _kv_tokens(config) // PIECE_TOKENS) or MAX_HASHES


def _kv_tokens(config: EngineConfig) -> int:
    """Return the number of tokens that fit into an engine's KV cache; 0 if unknown."""
    kv = config.model.kv
    return kv.num_blocks(config.cache.memory_bytes) * kv.block_size // max(1, len(kv.groups))
