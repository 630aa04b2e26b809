"""Extension points of the scheduler, and the registry of scheduling features.

A feature is one module of ``core/features`` with a function ``build(setup) -> Feature | None``; None means disabled.
Hooks are flattened into tuples at start, so a disabled feature costs nothing and changes no plan.

Hooks are deterministic: no clock, no I/O, no iteration over sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from quintet.core.kv.groups import GroupBlocks
from quintet.wire.config import CacheConfig, SchedulerConfig

if TYPE_CHECKING:
    from quintet.core.requests.request import Request
    from quintet.core.scheduler_state import SchedulerState
    from quintet.core.step_builder import StepBuilder


@dataclass(slots=True, frozen=True)
class Setup:
    """Configuration that decides which features are enabled."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    prompt_embeds: bool = False
    """Requests may have embeddings in their prompts."""
    pooling: bool = False
    """Requests may be pooling requests."""


class PrefixMatch(msgspec.Struct, frozen=True):
    """KV that already exists for the first ``num_tokens`` tokens of a request."""

    num_tokens: int
    shared: Sequence[GroupBlocks]
    """Per group of layers: full blocks that the request only reads. Per state group: the block with its initial state."""
    tails: Sequence[int | None] = ()
    """Per token group: a partial block that the request writes into, so it is copied. None where it is restored from
    the host.
    """
    num_cached: int = 0
    """Number of the tokens reported to the client as cached."""
    num_queried: int = 0
    """Number of tokens looked up in a cache."""
    restored: Sequence[Sequence[int]] = ()
    """Per group of layers: host blocks that follow the shared ones and are copied into the request's own blocks."""

    @property
    def known_tails(self) -> list[int]:
        """Tails that are on the device."""
        return [tail for tail in self.tails if tail is not None]


CanSchedule = Callable[["SchedulerState", "Request"], bool]
"""Return True when this waiting request may enter in this step. Otherwise later ones pass it."""

MatchPrefix = Callable[["SchedulerState", "Request"], "PrefixMatch | None"]
"""Return existing KV for a prefix of the request. The longest match is used.

Called when the request enters, and in each step in which it has more than one uncomputed token.
"""

LimitTokens = Callable[["SchedulerState", "Request", int, int], int]
"""Map ``(state, request, wanted, budget)`` to the number of tokens to compute now. Called for rows that want more than one.

The result may exceed the budget (it is cut). 0 means none in this step.
"""

Claim = Callable[["SchedulerState", "Request"], bool]
"""Return True when a request needs the feature's plan columns. `SchedulerState.num_claims` counts these requests."""

Attach = Callable[["SchedulerState", "StepBuilder"], None]
"""Set the feature's plan columns (`StepBuilder.columns`). Called for each step with rows while a live request has a claim."""

OnPreempt = Callable[["SchedulerState", "Request"], None]
"""Called before a running request loses its slot and blocks, so that the feature can save its KV."""


@dataclass(slots=True, frozen=True)
class Feature:
    """Hooks of one feature; most use one or two."""

    name: str
    can_schedule: CanSchedule | None = None
    match_prefix: MatchPrefix | None = None
    limit_tokens: LimitTokens | None = None
    on_preempt: OnPreempt | None = None
    claim: Claim | None = None
    attach: Attach | None = None


@dataclass(slots=True, frozen=True)
class Hooks:
    """Hooks of all enabled features, in the order of the registry."""

    can_schedule: tuple[CanSchedule, ...] = ()
    match_prefix: tuple[MatchPrefix, ...] = ()
    limit_tokens: tuple[LimitTokens, ...] = ()
    on_preempt: tuple[OnPreempt, ...] = ()
    columns: tuple[tuple[str, Claim, Attach], ...] = ()
    """Features with plan columns: name, `Claim` and `Attach`."""


FEATURES: dict[str, str] = {
    "chunked_prefill": "quintet.core.features.chunked_prefill",
    "prefix_cache": "quintet.core.features.prefix_cache",
    "kv_connector": "quintet.core.features.kv_connector",
    "prefill_pacing": "quintet.core.features.prefill_pacing",
    "latency_target": "quintet.core.features.latency_target",
    "prompt_embeds": "quintet.core.features.prompt_embeds",
    "pooling": "quintet.core.features.pooling",
    "drafts": "quintet.core.features.drafts",
}
"""Name -> module, in the order in which the hooks are called."""


def build_features(setup: Setup, registry: dict[str, str] = FEATURES) -> list[Feature]:
    """Import every registered feature and return the enabled ones."""
    built = (import_module(module).build(setup) for module in registry.values())
    return [feature for feature in built if feature is not None]


def flatten(features: Iterable[Feature]) -> Hooks:
    """Group the hooks of these features by kind."""
    features = list(features)
    return Hooks(
        can_schedule=tuple(f.can_schedule for f in features if f.can_schedule is not None),
        match_prefix=tuple(f.match_prefix for f in features if f.match_prefix is not None),
        limit_tokens=tuple(f.limit_tokens for f in features if f.limit_tokens is not None),
        on_preempt=tuple(f.on_preempt for f in features if f.on_preempt is not None),
        columns=tuple(
            (f.name, f.claim, f.attach) for f in features if f.claim is not None and f.attach is not None
        ),
    )
