"""Indexes of the tokens of running requests, one for each slot, built when a request first proposes drafts."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.executor.speculation.gram_index import GramIndex, Tokens

MIN_CAPACITY = 1024
"""Tokens of the smallest index. A request that outgrows its index gets one of twice its tokens."""


class RequestIndexes:
    """Earlier occurrences of a request's newest tokens in its own prompt and output."""

    def __init__(self, token_ids: Tokens, grams: Sequence[int], max_match: int) -> None:
        """token_ids: int32[slots, tokens]. grams, max_match: see `GramIndex`."""
        self._token_ids, self._grams, self._max_match = token_ids, grams, max_match
        self._indexes: dict[int, tuple[GramIndex, int]] = {}
        """Index of each slot, and the number of tokens in it."""

    def drop(self, slot: int) -> None:
        """Forget the request of a slot."""
        self._indexes.pop(slot, None)

    def updated(self, slot: int, num_tokens: int) -> GramIndex:
        """Return the index of a request with so many known tokens; it adds those since the last call."""
        index, num_added = self._indexes.get(slot, (None, 1))
        if index is None or num_tokens > index.capacity:
            capacity = min(self._token_ids.shape[1], max(MIN_CAPACITY, 2 * num_tokens))
            index, num_added = GramIndex(self._token_ids[slot, :capacity], self._grams, self._max_match), 1
        index.add(num_added, num_tokens, 0)
        self._indexes[slot] = index, num_tokens
        return index
