"""Metrics of suffix decoding's cache of outputs."""

from __future__ import annotations

from quintet.executor.speculation.output_cache import OutputCache
from quintet.wire.metrics import Metrics


class OutputCacheMetrics:
    """Size and evictions of the cache."""

    def __init__(self, metrics: Metrics, cache: OutputCache) -> None:
        self._cache = cache
        self._requests = metrics.gauge(
            "spec_decode_cached_requests", "Outputs of earlier requests that suffix decoding caches."
        )
        self._bytes = metrics.gauge(
            "spec_decode_cache_bytes", "Memory of the cached outputs and their index."
        )
        self._evictions = metrics.counter(
            "spec_decode_cache_evictions", "Outputs evicted from the cache of suffix decoding."
        )

    def note_step(self) -> None:
        """Read the cache."""
        self._requests.value = float(self._cache.num_requests)
        self._bytes.value = float(self._cache.num_bytes)
        self._evictions.value = float(self._cache.num_evicted)
