"""The core's account of itself."""

from __future__ import annotations

from quintet.core.load import load_of
from quintet.core.metrics import CoreMetrics
from quintet.wire.metrics import Metrics, decode_snapshot

from .fake import World

PROMPT = list(range(10, 30))


def test_load_and_counters() -> None:
    world = World(slots=2, num_blocks=20, depth=1)
    for request_id in range(3):
        world.admit(request_id, [request_id, *PROMPT], max_tokens=30, ignore_eos=True)
    world.step()
    state = world.engine.state
    assert state is not None
    load = load_of(state)
    assert (load.num_running, load.num_waiting) == (2, 1)
    assert load.kv_usage == 12 / 20
    metrics = Metrics()
    core_metrics = CoreMetrics(metrics)
    core_metrics.note_state(state)
    core_metrics.note_state(state)
    snapshot = decode_snapshot(metrics.encoded())
    values = {series.name: series.value for series in snapshot.counters + snapshot.gauges}
    assert values["generation_tokens"] == 2 and values["prompt_tokens"] == 42
    assert values["num_requests_waiting"] == 1 and values["kv_cache_usage_perc"] == 0.6
    waits = {series.name: sum(series.counts) for series in snapshot.histograms}
    assert waits["request_queue_time_seconds"] == 2


def test_preemptions_are_counted() -> None:
    world = World(slots=2, num_blocks=12, depth=1)
    for request_id in range(2):
        world.admit(request_id, [request_id, *PROMPT], max_tokens=20, ignore_eos=True)
    world.run()
    assert world.engine.state is not None and world.engine.state.counters.preemptions > 0


def test_last_words_name_steps_and_requests() -> None:
    world = World(start=False)
    assert "no capacity" in world.engine.describe()
    world.new_executor()
    world.admit(41, PROMPT)
    world.plan()
    assert "[1]" in world.engine.describe() and "41" in world.engine.describe()
