"""Load balancing: the choice of an engine, a pure function of the engines' loads.

Knows no requests and no HTTP. `quintet.frontend.load_balancing.load_ledger` counts the load of engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from quintet.wire.config import Routing


@dataclass(frozen=True, slots=True)
class Candidate:
    """Load and cache state of an engine that could take a request."""

    index: int
    num_queued: int = 0
    """Prompt tokens not yet prefilled."""
    num_open: int = 0
    """Running and queued choices."""
    num_cached: int = 0
    """Estimated prefix cache hit of this request's prompt, in tokens."""
    used: int = 0
    """Last use of the cached prefix, in the engine's own count."""
    name: str = ""
    """Name shared by all frontends and routers, if the index is not."""
    slowness: float = 1.0
    """Measured time per token relative to the mean of all engines; 1 if unknown."""
    kv_free: int | None = None
    """Free KV cache tokens; None if unknown."""
    is_full: bool = False
    """True if new prefixes evict cached ones, as far as known."""


class EngineChoice(msgspec.Struct, frozen=True):
    """Chosen engine and the reason."""

    index: int
    reason: str
    num_cached: int = 0
    used: int = 0


MEAN_OVER = 256
"""Requests in a running mean, about; without a quarter of them a mean is unknown."""
RUNNING_TOKENS = 16
"""Delay that a running choice adds to a prefill, in prompt tokens: each step computes both."""

LATER_WEIGHT = 0.1
"""Weight of the delay of later requests, for an arrival rate that keeps the engines busy."""
LONG = 12
"""A prompt this many times the mean length is long. This and `LATER_WEIGHT` come from simulation: higher values let two long
prompts block two engines; lower values queue long prompts one after another where they are common."""
EVICTION_COST = 0.5
"""Extra cost per token that evicts a cached token, which some request later recomputes. From two cores in virtual time
(`python -m bench.routing.simulated_cores`): at 0, engines that could hold all prefixes between them evict each other's."""
MAX_SLOWNESS = 16.0
"""Bound on slowness and its inverse, so that a slow engine still gets requests and is measured again."""


def choose(
    engines: Sequence[Candidate],
    policy: Routing,
    turn: int,
    session: str = "",
    num_tokens: int = 0,
    usual: float = 0.0,
    num_kv_tokens: int = 0,
) -> EngineChoice:
    """Choose the engine of one request.

    ``turn``: number of choices made; breaks ties round-robin. ``session``: conversation key, or "". ``num_tokens``: prompt
    tokens. ``usual``: mean uncached prompt tokens (0: unknown). ``num_kv_tokens``: KV cache tokens for prompt and output
    without a cache hit (0: unknown).

    round-robin  the next engine in turn
    load         least delay, see `_delay`, among engines with free KV cache, else among all
    prefix       the same, less the cached tokens of this prompt
    session      one engine per session (highest random weight, Thaler and Ravishankar, 1998), else by load
    """
    ordered = sorted(engines, key=lambda engine: engine.index)
    start = turn % len(ordered)
    in_turn = ordered[start:] + ordered[:start]
    if policy == "round-robin":
        chosen, reason = in_turn[0], "round-robin"
    elif policy == "session" and session:
        chosen = max(ordered, key=lambda engine: _weight(session, engine.name or engine.index))
        reason = "session affinity"
    else:
        saves = policy == "prefix"
        with_memory = [
            e for e in in_turn if fits_kv(e.kv_free, num_kv_tokens, e.num_cached if saves else 0)
        ] or in_turn
        least = sorted(map(_load, in_turn))[:2] if usual and num_tokens >= LONG * usual else []
        chosen = min(with_memory, key=lambda engine: _delay(engine, least, saves, num_tokens, usual))
        reason = f"{chosen.num_queued} queued tokens, {chosen.num_open} open"
        reason += f", {chosen.num_cached} cached" if policy == "prefix" else ""
        slowness = _slowness(chosen)
        reason += f", {slowness:.2g} times the mean latency" if slowness != 1 else ""
        num_full = len(in_turn) - len(with_memory)
        reason += f", {num_full} of {len(in_turn)} lack KV memory" if num_full else ""
    return EngineChoice(chosen.index, reason, chosen.num_cached, chosen.used)


def fits_kv(kv_free: int | None, num_kv_tokens: int, num_shared: int) -> bool:
    """True if free KV cache holds a request's tokens less the cached ones, or is unknown (None)."""
    return kv_free is None or kv_free >= num_kv_tokens - num_shared


def _slowness(engine: Candidate) -> float:
    """Return the bounded slowness; 1 if the measurement is not a positive finite number."""
    slowness = engine.slowness
    if not (math.isfinite(slowness) and slowness > 0):
        return 1.0
    return min(max(slowness, 1 / MAX_SLOWNESS), MAX_SLOWNESS)


def _load(engine: Candidate) -> float:
    """Return the load of an engine, in tokens that a mean engine computes in the same time."""
    return _slowness(engine) * (engine.num_queued + RUNNING_TOKENS * engine.num_open)


def _delay(engine: Candidate, least: Sequence[float], saves: bool, num_tokens: int, usual: float) -> float:
    """Return the request's queueing delay less cached tokens, plus the delay it causes for later requests.

    In prompt tokens of a mean engine: a half as fast engine counts twice. ``least``: loads of the two least loaded engines,
    if the prompt may be long. A later request waits only while no engine is idle. A prompt that occupies the last idle
    engine therefore delays requests of ``usual`` tokens by its squared time over twice that. So a second long prompt queues
    after the first one where long prompts are rare.
    """
    saved = engine.num_cached if saves else 0
    num_new = max(0, num_tokens - saved)
    slowness, load = _slowness(engine), _load(engine)
    own = load - saved + (slowness - 1) * num_new
    if saves and engine.is_full:
        own += EVICTION_COST * num_new
    if len(least) < 2 or num_new < LONG * usual:
        return own
    least_other = least[1] if load == least[0] else least[0]
    all_busy = min(least_other, load + slowness * num_new)
    return own + LATER_WEIGHT * all_busy * all_busy / (2 * usual)


def _weight(session: str, engine: str | int) -> bytes:
    """Return a pseudo-random weight that is the same in every process."""
    return blake2b(f"{engine} {session}".encode(errors="surrogatepass"), digest_size=8).digest()
