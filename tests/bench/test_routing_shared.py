"""Shared prefixes on two engines with enough memory together, in virtual time."""

from __future__ import annotations

from bench.routing.simulated_cores import Simulation, eviction_cost


def test_engines_do_not_evict_shared_prefixes() -> None:
    """Without counting evictions, both engines compute the same prefixes."""
    for order in range(2):
        assert Simulation(8, order).hit_rate() > 0.9
    with eviction_cost(0.0):
        assert Simulation(8, 0).hit_rate() < 0.8
