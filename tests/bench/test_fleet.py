"""The simulated fleet: its traces, its coarse steps, and what it says of ways to choose."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from bench.fleet.__main__ import Report, save
from bench.fleet.engine import H100_8B, SimulatedEngine, prompt_ids
from bench.fleet.play import Fleet, Troubles
from bench.fleet.traces import SHAPES, Trace, draw


@pytest.mark.parametrize(
    ("shape", "num_in", "num_out", "share"),
    [("mooncake-tool", 8596, 182, 0.59), ("mooncake-chat", 12035, 343, 0.40), ("azure-chat", 1155, 211, 0.0)],
)
def test_traces_have_the_means_that_were_published(
    shape: str, num_in: int, num_out: int, share: float
) -> None:
    trace = draw(SHAPES[shape], 20_000, 40, 3)
    num_prompt = trace.num_shared + trace.num_own
    assert num_prompt.mean() == pytest.approx(num_in, rel=0.08)
    assert trace.num_output.mean() == pytest.approx(num_out, rel=0.05)
    assert trace.ideal().sum() / num_prompt.sum() == pytest.approx(share, abs=0.04)
    assert len(trace) / trace.arrival_s[-1] == pytest.approx(40, rel=0.1)
    assert (np.diff(trace.arrival_s) >= 0).all()


def test_a_conversation_comes_back_with_what_it_had_and_its_answer() -> None:
    trace = draw(SHAPES["mooncake-tool"], 2000, 20, 0, grain=32)
    later = next(at for at in range(len(trace)) if trace.num_known[at])
    before = max(at for at in range(later) if trace.conversation[at] == trace.conversation[later])
    first, second = (np.frombuffer(prompt_ids(trace, at, 32), np.int32).tolist() for at in (before, later))
    num_found = (int(trace.num_shared[later]) + int(trace.num_known[later])) // 32
    assert second[: len(first)] == first
    assert second[len(first) : num_found] == [5] * (int(trace.num_output[before]) // 32)


def tail(trace: Trace, policy: str, grain: int = 32, **given: object) -> tuple[float, float, float]:
    """Play to eight engines; return the share found, the 99th percentile of first tokens, and the whole time's mean."""
    troubles = given.pop("troubles", Troubles())
    assert isinstance(troubles, Troubles)
    outcome = Fleet(trace, H100_8B, 8, policy, grain, troubles=troubles, **given).play()  # type: ignore[arg-type]
    first_s = np.array(outcome.first_s) - trace.arrival_s
    assert (first_s > 0).all() and (np.array(outcome.end_s) >= np.array(outcome.first_s)).all()
    whole_s = float((np.array(outcome.end_s) - trace.arrival_s).mean())
    return (
        round(sum(outcome.cached) / int(trace.ideal().sum()), 6),
        float(np.quantile(first_s, 0.99)),
        whole_s,
    )


TRACE = draw(SHAPES["mooncake-tool"], 300, 24, 5, grain=32)


def test_the_same_trace_has_the_same_outcome_and_prefixes_are_found_sooner() -> None:
    found, p99, _ = tail(TRACE, "prefix")
    assert tail(TRACE, "prefix")[:2] == (found, p99)
    blind, blind_p99, _ = tail(TRACE, "round-robin")
    assert found > 1.3 * blind and p99 < blind_p99


def test_whatever_dies_every_request_ends_once_and_later() -> None:
    undisturbed = tail(TRACE, "prefix", num_routers=2)
    disturbed = tail(TRACE, "prefix", num_routers=2, troubles=Troubles(2, 1, num_routers_lost=1))
    assert disturbed[1] > undisturbed[1]


def test_routers_that_draw_choose_otherwise_than_those_that_take_the_least_loaded() -> None:
    assert tail(TRACE, "load", num_routers=4) != tail(TRACE, "load", num_routers=4, drawn=False)
    assert tail(TRACE, "load") == tail(TRACE, "load", drawn=False), "one router knows all"


def test_routers_that_learn_of_slow_engines_and_full_memory_are_better_than_those_that_do_not() -> None:
    """And of engines that are equal, with room, they say the same."""
    for troubles in (Troubles(num_slow=2, slowness=4.0), Troubles(num_scarce=4, scarcity=0.1)):
        trace = draw(SHAPES["mooncake-tool"], 600, 20, 5, grain=32)
        sees, blind = (tail(trace, "load", troubles=troubles, blind=blind)[1] for blind in (False, True))
        assert sees < blind, troubles
    calm = draw(SHAPES["mooncake-tool"], 300, 8, 5, grain=32)
    assert tail(calm, "prefix")[:2] == tail(calm, "prefix", blind=True)[:2]


def test_figures_are_saved_with_the_command_that_prints_them(tmp_path: Path) -> None:
    """Of several commands in one file each with its own."""
    words = ["--engines", "2", "--requests", "40", "--grain", "32", "--policies", "load", "--save"]
    file = tmp_path / "figures.json"
    for more in ([], ["--least-loaded", "--routers", "2"]):
        save([*words, str(file), *more])
    commands = [each.command for each in msgspec.json.decode(file.read_bytes(), type=Report).figures]
    assert commands == [
        f"python -m bench.fleet {' '.join(words)} {file}",
        f"python -m bench.fleet {' '.join(words)} {file} --least-loaded --routers 2",
    ]


def test_a_coarse_step_takes_as_long_as_the_steps_that_it_stands_for() -> None:
    """One request alone: its prompt, then its outputs."""
    trace = draw(SHAPES["mooncake-chat"], 1, 1, 2, grain=32)
    assert trace.num_output[0] > 64
    ends = []
    for grain in (1, 32):
        engine, now_s = SimulatedEngine(H100_8B, grain), 0.0
        engine.admit(0, prompt_ids(trace, 0, grain), int(trace.num_output[0]), 0, 0, now_s)
        while (end_s := engine.begin(now_s)) is not None:
            now_s = end_s
            engine.end(now_s)
        ends.append(now_s)
    assert ends[0] == pytest.approx(ends[1], rel=0.1)
