"""Metrics of the core."""

from __future__ import annotations

from quintet.core.metrics import CoreMetrics
from quintet.wire.metrics import Metrics, decode_snapshot

from .fake import World
from .fake_model import expected

PROMPT = list(range(10, 30))


def test_load_and_counters() -> None:
    world = World(slots=2, num_blocks=20, max_steps_in_flight=1)
    for request_id in range(3):
        world.admit(request_id, [request_id, *PROMPT], max_tokens=30, ignore_eos=True)
    world.step()
    state = world.engine.state
    assert state is not None
    metrics = Metrics()
    core_metrics = CoreMetrics(metrics)
    for _ in range(2):
        core_metrics.note_state(state)
        core_metrics.note_endings(state, world.tick())
    snapshot = decode_snapshot(metrics.encoded())
    values = {series.name: series.value for series in snapshot.counters + snapshot.gauges}
    assert values["generation_tokens"] == 2 and values["prompt_tokens"] == 42
    assert values["num_requests_running"] == 2 and values["num_requests_waiting"] == 1
    assert values["kv_cache_usage_perc"] == 0.6
    waits = {series.name: sum(series.counts) for series in snapshot.histograms}
    assert waits["request_queue_time_seconds"] == 2


def test_preemptions_are_counted() -> None:
    world = World(slots=2, num_blocks=12, max_steps_in_flight=1)
    for request_id in range(2):
        world.admit(request_id, [request_id, *PROMPT], max_tokens=20, ignore_eos=True)
    world.run()
    assert world.engine.state is not None and world.engine.state.counters.preemptions > 0


def test_crash_report_names_steps_and_requests() -> None:
    world = World(start=False)
    assert "no capacity" in world.engine.describe()
    world.new_executor()
    world.admit(41, PROMPT)
    world.plan()
    assert "[1]" in world.engine.describe() and "41" in world.engine.describe()


def test_metrics_of_ended_requests() -> None:
    world = World(slots=3, num_blocks=12, max_steps_in_flight=1)
    world.admit(1, PROMPT, n=2, max_tokens=20, ignore_eos=True)
    world.step()
    state = world.engine.state
    assert state is not None
    metrics = Metrics()
    core_metrics = CoreMetrics(metrics)
    core_metrics.note_state(state)
    gauges = {series.labels: series.value for series in decode_snapshot(metrics.encoded()).gauges}
    assert gauges[("reason", "capacity"),] == 0 and gauges[("reason", "deferred"),] == 1
    world.step()
    world.cancel(2)
    world.run()
    for _ in range(2):  # each ending counts once
        core_metrics.note_endings(state, world.tick())
    series = {series.name: series for series in decode_snapshot(metrics.encoded()).histograms}
    for name in ("inference_time_seconds", "prefill_time_seconds", "decode_time_seconds", "num_preemptions"):
        assert sum(series[f"request_{name}"].counts) == 2, name
    longest = series["request_max_num_generation_tokens"]
    assert (sum(longest.counts), longest.total) == (1, 20)
    assert series["request_prefill_kv_computed_tokens"].total == len(PROMPT) + 1  # the second request forks
    world.admit(3, PROMPT)
    world.run()
    core_metrics.note_state(state)
    values = {series.name: series.value for series in decode_snapshot(metrics.encoded()).counters}
    assert values["prompt_tokens_cached"] == values["prefix_cache_hits"] > 0


def test_shared_outputs_do_not_count_as_computed_prompt_tokens() -> None:
    """Two requests resume after the same outputs, and each continues from the chunks of the other."""
    world = World(long_prefill_token_threshold=5)
    known = expected(PROMPT[:4], 1, 30, stops=())
    for request_id in (1, 2):
        world.admit(request_id, PROMPT[:4], seed=1, output_ids=known, max_tokens=40, ignore_eos=True)
    assert world.engine.state is not None
    requests = list(world.engine.state.live.values())
    world.run()
    assert [request.stats.num_computed for request in requests] == [4, 0]


def test_cache_config_is_exported_as_labels() -> None:
    world = World()
    metrics = Metrics()
    core_metrics = CoreMetrics(metrics)
    for num_blocks in (64, 32):
        world.new_executor(num_blocks)
        assert world.engine.state is not None
        core_metrics.note_limits(world.engine.state.limits)
    infos = [g for g in decode_snapshot(metrics.encoded()).gauges if g.name == "cache_config_info"]
    labels = {"block_size": "4", "num_gpu_blocks": "32", "enable_prefix_caching": "True"}
    assert [(dict(g.labels), g.value) for g in infos] == [(labels, 1)]
