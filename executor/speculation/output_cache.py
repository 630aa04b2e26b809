"""Outputs of earlier requests, in a ring of bounded size with an index.

    index  0    1 …                              capacity - 1
           end  output, end, output, end, …      the newest outputs overwrite the oldest ones

An output is stored with the last tokens of its prompt before it, so that its first tokens are found too. It is never
split between the end and the start of the ring.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from quintet.executor.speculation.gram_index import GramIndex, Tokens
from quintet.wire.metrics import Metrics

END = -1
"""Marks the end of each output; it equals no token. ``csrc/cpu/ops/suffix_drafts.cpp`` has it too."""

CACHED_TOKEN_BYTES = 12
"""A token and its scope, without the index."""


class OutputCache:
    """The newest outputs. Lookups find those of the same scope only; see `GramIndex.find`."""

    def __init__(self, max_requests: int, max_tokens: int, grams: tuple[int, ...], max_match: int) -> None:
        self._max_requests = max_requests
        capacity = max_tokens + 2
        self._tokens = np.zeros(capacity, np.int32)
        self._tokens[0] = END
        self._scopes = np.zeros(capacity, np.uint64)
        self.index = GramIndex(self._tokens, grams, max_match, self._scopes)
        """Lookups in it take `oldest`."""
        self._bytes_per_token = self.index.bytes_per_token + CACHED_TOKEN_BYTES
        self._starts: deque[int] = deque()
        """Place of the first token of each output, oldest first. Places grow; see `GramIndex`."""
        self._next = 1
        self.num_evicted = 0

    @property
    def num_requests(self) -> int:
        """Number of cached outputs."""
        return len(self._starts)

    @property
    def num_bytes(self) -> int:
        """Memory of the cached tokens and their share of the index."""
        return round((self._next - self._starts[0]) * self._bytes_per_token) if self._starts else 0

    @property
    def oldest(self) -> int:
        """Places up to this one are no longer valid."""
        return self._starts[0] if self._starts else self._next

    def add(self, tokens: Tokens, scope: int) -> None:
        """Add an output, or its last part if it is larger than the cache. Evict the oldest ones above the limits."""
        capacity = len(self._tokens)
        tokens = tokens[-(capacity - 2) :]
        if len(tokens) < 2 or not self._max_requests:
            return
        start = self._next if self._next % capacity else self._next + 1
        if start % capacity + len(tokens) >= capacity:
            start += capacity - start % capacity + 1
        self._next = start + len(tokens) + 1
        while self._starts and (
            self._starts[0] < self._next - capacity or len(self._starts) >= self._max_requests
        ):
            self._starts.popleft()
            self.num_evicted += 1
        self._starts.append(start)
        at = start % capacity
        self._tokens[at : at + len(tokens)] = tokens
        self._tokens[at + len(tokens)] = END
        self._scopes[at : at + len(tokens)] = scope
        self.index.add(start + 1, start + len(tokens), start, scope, self._starts[0])


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
