"""Metrics of several processes merged."""

from quintet.frontend.metrics import merge
from quintet.wire.metrics import CounterSeries, GaugeSeries, HistogramSeries, Metrics


def histogram(bounds: tuple[float, ...], *values: float) -> HistogramSeries:
    series = Metrics().histogram("h", "", bounds)
    for value in values:
        series.observe(value)
    return series


def test_counts_and_gauges_add_up() -> None:
    assert merge(CounterSeries("c", "", (), 2), CounterSeries("c", "", (), 3)).value == 5  # type: ignore[union-attr]
    assert merge(GaugeSeries("g", "", (), 2), GaugeSeries("g", "", (), 3)).value == 5  # type: ignore[union-attr]


def test_ratios_merge_to_the_largest() -> None:
    a, b = (GaugeSeries("kv_cache_usage_perc", "", (), value) for value in (0.25, 0.75))
    assert merge(a, b) == GaugeSeries("kv_cache_usage_perc", "", (), 0.75)


def test_equal_buckets_add_up() -> None:
    merged = merge(histogram((1, 2, 3), 0.5, 2.5), histogram((1, 2, 3), 2.5, 9))
    assert merged == histogram((1, 2, 3), 0.5, 2.5, 2.5, 9)


def test_different_buckets_merge_to_common_ones() -> None:
    merged = merge(histogram((1, 2, 3), 0.5, 1.5, 2.5, 5), histogram((2, 3, 4), 1.5, 2.5, 3.5, 5))
    assert merged == histogram((2, 3), 0.5, 1.5, 1.5, 2.5, 2.5, 3.5, 5, 5)


def test_without_common_buckets_only_the_total_remains() -> None:
    merged = merge(histogram((1,), 0.5), histogram((2,), 0.5, 3))
    assert isinstance(merged, HistogramSeries)
    assert (merged.bounds, merged.counts, merged.total) == ((), [3], 4.0)
