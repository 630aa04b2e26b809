"""Simulated fleet: traces, coarse steps, and routing policies."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from bench.fleet.__main__ import Report, save
from bench.fleet.engine import H100_8B, SimulatedEngine, prompt_ids
from bench.fleet.simulation import Failures, Fleet
from bench.fleet.traces import SHAPES, Trace, draw


@pytest.mark.parametrize(
    ("shape", "num_in", "num_out", "share"),
    [("mooncake-tool", 8596, 182, 0.59), ("mooncake-chat", 12035, 343, 0.40), ("azure-chat", 1155, 211, 0.0)],
)
def test_traces_have_the_published_means(shape: str, num_in: int, num_out: int, share: float) -> None:
    trace = draw(SHAPES[shape], 20_000, 40, 3)
    num_prompt = trace.num_shared + trace.num_own
    assert num_prompt.mean() == pytest.approx(num_in, rel=0.08)
    assert trace.num_output.mean() == pytest.approx(num_out, rel=0.05)
    assert trace.ideal().sum() / num_prompt.sum() == pytest.approx(share, abs=0.04)
    assert len(trace) / trace.arrival_s[-1] == pytest.approx(40, rel=0.1)
    assert (np.diff(trace.arrival_s) >= 0).all()


def test_next_turn_contains_history_and_answer() -> None:
    trace = draw(SHAPES["mooncake-tool"], 2000, 20, 0, grain=32)
    later = next(at for at in range(len(trace)) if trace.num_known[at])
    before = max(at for at in range(later) if trace.conversation[at] == trace.conversation[later])
    first, second = (np.frombuffer(prompt_ids(trace, at, 32), np.int32).tolist() for at in (before, later))
    num_found = (int(trace.num_shared[later]) + int(trace.num_known[later])) // 32
    assert second[: len(first)] == first
    assert second[len(first) : num_found] == [5] * (int(trace.num_output[before]) // 32)


def simulate(trace: Trace, policy: str, grain: int = 32, **given: object) -> tuple[float, float, float]:
    """Simulate eight engines; return the hit rate, the 99th percentile of TTFT, and the mean latency."""
    failures = given.pop("failures", Failures())
    assert isinstance(failures, Failures)
    outcome = Fleet(trace, H100_8B, 8, policy, grain, failures=failures, **given).run()  # type: ignore[arg-type]
    ttft_s = np.array(outcome.first_s) - trace.arrival_s
    assert (ttft_s > 0).all() and (np.array(outcome.end_s) >= np.array(outcome.first_s)).all()
    latency_s = float((np.array(outcome.end_s) - trace.arrival_s).mean())
    return (
        round(sum(outcome.cached) / int(trace.ideal().sum()), 6),
        float(np.quantile(ttft_s, 0.99)),
        latency_s,
    )


TRACE = draw(SHAPES["mooncake-tool"], 300, 24, 5, grain=32)


def test_simulation_is_deterministic_and_prefix_routing_lowers_ttft() -> None:
    hits, p99, _ = simulate(TRACE, "prefix")
    assert simulate(TRACE, "prefix")[:2] == (hits, p99)
    unaware, unaware_p99, _ = simulate(TRACE, "round-robin")
    assert hits > 1.3 * unaware and p99 < unaware_p99


def test_with_failures_every_request_ends_once_and_later() -> None:
    undisturbed = simulate(TRACE, "prefix", num_routers=2)
    disturbed = simulate(TRACE, "prefix", num_routers=2, failures=Failures(2, 1, num_routers_lost=1))
    assert disturbed[1] > undisturbed[1]


def test_random_routing_differs_from_least_loaded() -> None:
    assert simulate(TRACE, "load", num_routers=4) != simulate(TRACE, "load", num_routers=4, is_random=False)
    assert simulate(TRACE, "load") == simulate(TRACE, "load", is_random=False), (
        "a single router has the full state"
    )


def test_speed_and_memory_aware_routing_is_better() -> None:
    """For equal engines with free memory the results are equal."""
    for failures in (Failures(num_slow=2, slowness=4.0), Failures(num_scarce=4, scarcity=0.1)):
        trace = draw(SHAPES["mooncake-tool"], 600, 20, 5, grain=32)
        aware, unaware = (
            simulate(trace, "load", failures=failures, blind=unaware)[1] for unaware in (False, True)
        )
        assert aware < unaware, failures
    equal = draw(SHAPES["mooncake-tool"], 300, 8, 5, grain=32)
    assert simulate(equal, "prefix")[:2] == simulate(equal, "prefix", blind=True)[:2]


def test_results_are_saved_with_their_command(tmp_path: Path) -> None:
    """Each of several commands in one file is kept."""
    argv = ["--engines", "2", "--requests", "40", "--grain", "32", "--policies", "load", "--save"]
    file = tmp_path / "figures.json"
    for flags in ([], ["--least-loaded", "--routers", "2"]):
        save([*argv, str(file), *flags])
    commands = [each.command for each in msgspec.json.decode(file.read_bytes(), type=Report).figures]
    assert commands == [
        f"python -m bench.fleet {' '.join(argv)} {file}",
        f"python -m bench.fleet {' '.join(argv)} {file} --least-loaded --routers 2",
    ]


def test_coarse_step_takes_as_long_as_its_steps() -> None:
    """One request: its prompt, then its outputs."""
    trace = draw(SHAPES["mooncake-chat"], 1, 1, 2, grain=32)
    assert trace.num_output[0] > 64
    ends = []
    for grain in (1, 32):
        engine, now_s = SimulatedEngine(H100_8B, grain), 0.0
        engine.admit(0, prompt_ids(trace, 0, grain), int(trace.num_output[0]), 0, 0, now_s)
        while (end_s := engine.begin_step(now_s)) is not None:
            now_s = end_s
            engine.end_step(now_s)
        ends.append(now_s)
    assert ends[0] == pytest.approx(ends[1], rel=0.1)
