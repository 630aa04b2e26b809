"""The four joints where a scheduling feature meets the scheduler, and the list of features.

A feature is one file in ``core/features`` with a function ``build(setup) -> Feature | None`` (None: switched off). Its
hooks are flattened into tuples once, at start, so a feature that is off costs nothing and changes no plan.

Hooks are plain functions of the state: no clock, no socket, no iteration over sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from quintet.core.kv.group_blocks import GroupBlocks
from quintet.wire.config import CacheConfig, SchedulerConfig

if TYPE_CHECKING:
    from quintet.core.request import Request
    from quintet.core.scheduler_state import SchedulerState


@dataclass(slots=True, frozen=True)
class Setup:
    """What a feature may look at when it decides whether it is on."""

    scheduler: SchedulerConfig
    cache: CacheConfig


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    """KV that already exists for the first ``num_tokens`` tokens of a request."""

    num_tokens: int
    shared: Sequence[GroupBlocks]
    """Of each group of layers the full blocks that the request will only read; of a group of states the one with the state
    that it begins with."""
    tails: Sequence[int | None] = ()
    """Of each group of layers that holds tokens a block that the request will write into, so that it gets a copy; None where
    that is restored."""
    num_cached: int = 0
    """How many of the tokens to report to the client as cached."""
    num_queried: int = 0
    """How many tokens were looked up in a cache."""
    restored: Sequence[Sequence[int]] = ()
    """Of each group of layers, host blocks whose contents follow those that are shared: the request gets blocks of its own,
    and copies in them."""

    @property
    def known_tails(self) -> list[int]:
        """Those of the tails that are on the device."""
        return [tail for tail in self.tails if tail is not None]


Gate = Callable[["SchedulerState", "Request"], bool]
"""May this waiting request enter in this step? One that may not is passed over by those behind it."""

Source = Callable[["SchedulerState", "Request"], "PrefixMatch | None"]
"""Where do some of this request's tokens already have KV? The longest answer is taken.

Asked when it enters, and again in each step in which it is behind by more than one token."""

Clamp = Callable[["SchedulerState", "Request", int, int], int]
"""Given ``(state, request, wanted, budget)``, how many tokens now? Asked for rows that want more than one.

The answer may exceed the budget (it is cut); 0 means not in this step."""

Keep = Callable[["SchedulerState", "Request"], None]
"""A running request is about to lose its slot and its blocks to others: what of it shall outlive that?"""


@dataclass(slots=True, frozen=True)
class Feature:
    """The hooks of one feature; most use one or two."""

    name: str
    gate: Gate | None = None
    source: Source | None = None
    clamp: Clamp | None = None
    keep: Keep | None = None


@dataclass(slots=True, frozen=True)
class Hooks:
    """The hooks of all features that are on, in the order of the list."""

    gates: tuple[Gate, ...] = ()
    sources: tuple[Source, ...] = ()
    clamps: tuple[Clamp, ...] = ()
    keeps: tuple[Keep, ...] = ()


FEATURES: dict[str, str] = {
    "quarantine": "quintet.core.features.quarantine",
    "chunked_prefill": "quintet.core.features.chunked_prefill",
    "fork": "quintet.core.features.fork",
    "prefix_cache": "quintet.core.features.prefix_cache",
    "kv_offload": "quintet.core.features.kv_offload",
    "kv_peer": "quintet.core.features.kv_peer",
    "kv_disk": "quintet.core.features.kv_disk",
    "kv_store": "quintet.core.features.kv_store",
    "just_in_time": "quintet.core.features.prefill_pacing",
    "step_time": "quintet.core.features.latency_target",
}
"""Name -> module, in the order in which their hooks are called."""


def build_features(setup: Setup, registry: dict[str, str] = FEATURES) -> list[Feature]:
    """Import every registered feature and return those that are on."""
    built = (import_module(module).build(setup) for module in registry.values())
    return [feature for feature in built if feature is not None]


def flatten(features: Iterable[Feature]) -> Hooks:
    """Sort the hooks of these features by kind."""
    features = list(features)
    return Hooks(
        gates=tuple(f.gate for f in features if f.gate is not None),
        sources=tuple(f.source for f in features if f.source is not None),
        clamps=tuple(f.clamp for f in features if f.clamp is not None),
        keeps=tuple(f.keep for f in features if f.keep is not None),
    )
