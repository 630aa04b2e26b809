"""Engine choice for the requests of this frontend.

Feeds `quintet.frontend.load_balancing.load_balancer.choose` with each engine's load (`load_ledger`), cached prefixes and speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quintet.frontend.load_balancing.engine_speed import EngineSpeeds, LinearFit
from quintet.frontend.load_balancing.load_balancer import MEAN_OVER, Candidate, EngineChoice, choose
from quintet.frontend.load_balancing.load_ledger import LoadLedger
from quintet.frontend.load_balancing.prefix_affinity import (
    MAX_HASHES,
    PIECE_TOKENS,
    PrefixAffinity,
    hash_prefixes,
)
from quintet.frontend.streams import Stream
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Started


class EngineHistory:
    """Cached prefixes and speed of one engine, from the requests sent there."""

    def __init__(self, max_hashes: int, usual: LinearFit) -> None:
        self.prefixes = PrefixAffinity(max_hashes)
        self.speed = EngineSpeeds(usual)


class EngineSelector:
    """Chooses engines, and learns from the results."""

    def __init__(
        self, ledger: LoadLedger, config: EngineConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger, self._workers, self._clock = ledger, ledger.workers, clock
        self._kv_tokens = _kv_tokens(config)
        self._speed_fit = LinearFit()
        shares = config.cache.enable_prefix_caching
        self._policy = config.frontend.routing if shares or config.frontend.routing != "prefix" else "load"
        self._histories: dict[int, EngineHistory] = {}
        self._max_hashes = min(MAX_HASHES, self._kv_tokens // PIECE_TOKENS) or MAX_HASHES
        """Number of prefix pieces that fit into an engine's KV cache."""
        self._num_chosen = 0
        self._mean_new_tokens = 0.0
        """Running mean of uncached prompt tokens."""

    def choose(self, stream: Stream) -> EngineChoice | None:
        """Choose the engine of a request; None without an engine. A pinned request goes to its engine while that lives."""
        pinned = stream.pinned_core
        if pinned is not None and self._workers.epoch(Role.CORE, pinned):
            return EngineChoice(pinned, "has the request")
        indexes = self._workers.engines()
        if len(indexes) < 2:
            return EngineChoice(indexes[0], "only engine") if indexes else None
        self._num_chosen += 1
        submit, spec = stream.submit, stream.submit.spec
        names = stream.prefix_hashes = hash_prefixes(submit.prompt, spec.cache_salt, spec.adapter)
        readable = names if spec.params.reads_prefix_cache else []
        kv_tokens = self._kv_tokens // max(1, self._workers.num_frontends)
        engines = [self._candidate(index, readable, kv_tokens) for index in indexes]
        session = submit.session or (str(names[0]) if names else "")
        turn, num_tokens = self._workers.me.index + self._num_chosen, self._ledger.of(stream).num_prompt
        usual = max(PIECE_TOKENS, self._mean_new_tokens) if self._num_chosen > MEAN_OVER // 4 else 0.0
        num_kv_tokens = self._ledger.num_kv_tokens(stream)
        choice = choose(engines, self._policy, turn, session, num_tokens, usual, num_kv_tokens)
        self._mean_new_tokens += (max(0, num_tokens - choice.num_cached) - self._mean_new_tokens) / min(
            self._num_chosen, MEAN_OVER
        )
        return choice

    def _candidate(self, index: int, names: list[int], kv_tokens: int) -> Candidate:
        load, history = self._ledger.engine(index), self.history(index)
        num_known, used = history.prefixes.find(names)
        return Candidate(
            index,
            load.num_queued,
            self._ledger.at(Role.CORE, index),
            PIECE_TOKENS * num_known,
            used,
            slowness=history.speed.slowness(self._clock()),
            kv_free=kv_tokens - load.num_kv if kv_tokens else None,
            is_full=history.prefixes.is_full,
        )

    def history(self, index: int) -> EngineHistory:
        history = self._histories.get(index)
        if history is None:
            history = self._histories[index] = EngineHistory(self._max_hashes, self._speed_fit)
        return history

    def note_sent(self, stream: Stream, choice: EngineChoice) -> None:
        """Note that a request was sent to an engine."""
        if stream.prefix_hashes:
            self.history(choice.index).prefixes.note(stream.prefix_hashes)

    def note_start(self, stream: Stream, started: Started) -> None:
        """Note the end of prefill: its time and its cache hit. A single engine is compared with no other."""
        choice = stream.choice
        if choice is None or len(self._workers.engines()) < 2:
            return
        is_new = not (stream.attempt or stream.num_open_tokens or stream.submit.spec.output_ids)
        if is_new and stream.started is started:
            num_tokens = started.num_prompt_tokens - started.num_cached_tokens
            now_s = self._clock()
            self.history(choice.index).speed.note(
                self._ledger.of(stream).num_tokens_ahead + num_tokens,
                now_s - 1e-9 * stream.submit.sent_ns,
                now_s,
            )
        if choice.num_cached and not stream.attempt and started.num_cached_tokens < choice.num_cached // 2:
            self.history(choice.index).prefixes.miss(choice.used)

    def lose(self, worker: WorkerId) -> None:
        """Note the loss of a core or an executor, and with it of the engine's cache."""
        history = self.history(worker.index)
        history.prefixes.clear()
        history.speed.forget()

    def can_leave(self, stream: Stream) -> bool:
        """True if a request of a lost executor can move to another engine now.

        False if its executor died before too, and it has generated no more since: it may cause the crash. Its core then waits
        for the next executor and isolates it.
        """
        return not stream.is_suspect and any(
            index != stream.submit.core for index in self._workers.ready_engines()
        )


def _kv_tokens(config: EngineConfig) -> int:
    """Return the number of tokens that fit into an engine's KV cache; 0 if unknown."""
    kv = config.model.kv
    return kv.num_blocks(config.cache.memory_bytes) * kv.block_size // max(1, len(kv.groups))
