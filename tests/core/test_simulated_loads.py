"""Default settings on a simulated two-core machine: the real core with a formula for step time.

Nothing is timed: a regression here is a change of policy, not of speed.
"""

from __future__ import annotations

import pytest
from bench.schedule_sim import MACHINES, Shape, Simulation, batch, figures

from quintet.wire.config import SchedulerConfig

RATE, FIRST_P50, FIRST_P99, FIRST_MEAN, BETWEEN_P99, BETWEEN_MAX = range(6)


def simulated(shapes: list[Shape], num_clients: int, machine: str, **options: object) -> list[float]:
    settings: dict[str, object] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    simulation = Simulation(
        MACHINES[machine],
        SchedulerConfig(**(settings | options)),  # type: ignore[arg-type]
        iter(shapes),
    )
    simulation.run(num_clients)
    return figures(simulation)


@pytest.mark.parametrize("machine", ["2-core", "2-core-fast"])
@pytest.mark.parametrize("num_clients", [8, 32])
def test_latency_target_costs_no_throughput(machine: str, num_clients: int) -> None:
    shapes = [(256, 64)] * (3 * num_clients)
    free = simulated(shapes, num_clients, machine)
    paced = simulated(shapes, num_clients, machine, step_target_ms=250)
    assert paced[BETWEEN_MAX] < 300
    assert paced[FIRST_P50] < 0.6 * free[FIRST_P50]
    assert paced[RATE] > 0.99 * free[RATE]


@pytest.mark.parametrize("num_requests", [16, 64])
def test_longest_first_ends_a_batch_sooner(num_requests: int) -> None:
    shapes = batch(num_requests)
    rates = [
        simulated(shapes, num_requests, "2-core-fast", policy=policy)[RATE] for policy in ("fcfs", "longest")
    ]
    assert rates[1] > 1.02 * rates[0]


def test_a_batch_of_equal_lengths_is_planned_alike() -> None:
    shapes = batch(32, outputs=(40, 40))
    rates = [simulated(shapes, 32, "2-core-fast", policy=policy)[RATE] for policy in ("fcfs", "longest")]
    assert rates[1] == rates[0]


def test_lifo_moves_the_wait_without_shortening_it() -> None:
    """Little's law: with a fixed number of clients, the mean response time is the same in every order."""
    shapes = [(256, 64)] * (4 * 32)
    first, latest = (
        simulated(shapes, 32, "2-core-fp32", policy=policy, step_target_ms=250)
        for policy in ("fcfs", "latest")
    )
    assert latest[FIRST_P50] < 0.5 * first[FIRST_P50]
    assert latest[FIRST_P99] < 2 * first[FIRST_P99]
    assert latest[RATE] > 0.99 * first[RATE]
    assert latest[FIRST_MEAN] == pytest.approx(first[FIRST_MEAN], rel=0.02)
    assert latest[BETWEEN_MAX] < 300


def test_longer_steps_lower_ttft_under_queueing() -> None:
    shapes = [(256, 64)] * (2 * 32)
    short, long = (simulated(shapes, 32, "2-core-fp32", step_target_ms=target) for target in (250, 350))
    assert long[FIRST_P50] < 0.7 * short[FIRST_P50]
    assert long[RATE] > 0.99 * short[RATE]
    assert long[BETWEEN_P99] < 400
