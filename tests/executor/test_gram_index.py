"""Index of n-grams and cache of outputs, compared with a search through all tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quintet.executor.speculation import gram_index
from quintet.executor.speculation.gram_index import MAX_PLACES, GramIndex, Matches, Tokens, doubling
from quintet.executor.speculation.output_cache import OutputCache
from quintet.wire.errors import ConfigError

GRAMS, MAX_MATCH = (1, 2, 4, 8), 13


def context_of(tokens: list[int]) -> Tokens:
    return np.array(tokens[-MAX_MATCH:], np.int32)


def match_length(text: list[int], place: int, context: list[int]) -> int:
    pairs = zip(reversed(text[:place]), reversed(context[-MAX_MATCH:]), strict=False)
    return next(
        (length for length, (a, b) in enumerate(pairs) if a != b), min(place, len(context), MAX_MATCH)
    )


def searched(texts: list[list[int]], context: list[int]) -> tuple[int, list[tuple[int, int]]]:
    """Return the longest match, and pairs of text and place, newest first, as `GramIndex.find` defines them."""
    for gram in reversed(GRAMS):
        found = [
            (match_length(text, place, context), number, place)
            for number, text in reversed(list(enumerate(texts)))
            for place in range(len(text) - 1, 0, -1)
        ]
        found = [each for each in found if each[0] >= gram][:MAX_PLACES]
        if found:
            longest = max(length for length, _, _ in found)
            return longest, [(number, place) for length, number, place in found if length == longest]
    return 0, []


def text_of(rng: random.Random, length: int, vocabulary: int) -> list[int]:
    """Return random tokens with repeated parts."""
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 4 and rng.random() < 0.3:
            begin = rng.randrange(len(tokens))
            tokens += tokens[begin : begin + rng.randrange(1, 20)]
        else:
            tokens.append(rng.randrange(vocabulary))
    return tokens[:length]


@pytest.mark.parametrize("seed", range(20))
def test_index_finds_what_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    text = text_of(rng, 400, rng.choice([2, 5, 40, 100_000]))
    index, num_added = GramIndex(np.array(text, np.int32), GRAMS, MAX_MATCH), 1
    for known in sorted({1, 2, 3, *rng.sample(range(1, 401), 60)}):
        index.add(num_added, known, 0)
        num_added = known
        found = index.find(context_of(text[:known]))
        length, places = searched([text[:known]], text[:known])
        assert found == Matches(length, [place for _, place in places])


@pytest.mark.parametrize("seed", range(20))
def test_cache_finds_what_a_search_of_the_newest_outputs_finds(seed: int) -> None:
    rng = random.Random(seed)
    max_requests, max_tokens = rng.choice([3, 8, 100]), rng.choice([60, 300, 5000])
    cache = OutputCache(max_requests, max_tokens, GRAMS, MAX_MATCH)
    added: list[tuple[int, list[int]]] = []
    for _ in range(60):
        text, scope = text_of(rng, rng.randrange(1, 90), rng.choice([3, 30])), rng.choice([0, 7, 1 << 63])
        cache.add(np.array(text, np.int32), scope)
        if len(text) > 1:
            added.append((scope, text[-max_tokens:]))
        kept = added[len(added) - cache.num_requests :]
        assert cache.num_evicted == len(added) - len(kept)
        assert len(kept) <= max_requests and sum(len(each) + 1 for _, each in kept) <= max_tokens + 1
        context = text_of(rng, rng.randrange(1, 12), 3)
        context += rng.choice(kept)[1][: rng.randrange(1, 30)] if kept else []
        texts = [each for owner, each in kept if owner == scope]
        length, expected = searched(texts, context)
        found = cache.index.find(context_of(context), scope, cache.oldest)
        continuations = [continuation(cache, place) for place in found.places]
        assert (found.length, continuations) == (
            length,
            [texts[number][place:] for number, place in expected],
        )


def continuation(cache: OutputCache, place: int) -> list[int]:
    """Return the tokens from a place of the ring to the end of their output."""
    rest: list[int] = cache.index.tokens[place % cache.index.capacity :].tolist()
    return rest[: rest.index(-1)]


def test_cache_of_no_requests_stores_nothing() -> None:
    cache = OutputCache(0, 100, GRAMS, MAX_MATCH)
    cache.add(np.arange(9, dtype=np.int32), 0)
    assert (cache.num_requests, cache.num_bytes, cache.num_evicted) == (0, 0, 0)


def test_output_larger_than_the_cache_keeps_its_last_part() -> None:
    cache = OutputCache(5, 20, GRAMS, MAX_MATCH)
    cache.add(np.arange(100, dtype=np.int32), 0)
    assert cache.index.find(context_of([3, 4]), 0, cache.oldest).places == []
    (place,) = cache.index.find(context_of([94, 95]), 0, cache.oldest).places
    assert continuation(cache, place) == [96, 97, 98, 99]


def test_cache_memory_is_bounded() -> None:
    cache = OutputCache(1000, 500, GRAMS, MAX_MATCH)
    for seed in range(200):
        cache.add(np.array(text_of(random.Random(seed), 37, 50), np.int32), 0)
    full = cache.num_bytes
    assert 0 < full <= 502 * 150 and cache.num_evicted > 180


def test_search_ends_after_enough_longest_matches() -> None:
    tokens = np.array([5] * 40, np.int32)
    index = GramIndex(tokens, doubling(2, 5), 5)
    index.add(1, 40, 0)
    assert index.grams == (2, 4)
    assert index.find(tokens[-5:], enough=1) == Matches(5, [39])


def test_missing_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_index, "open_library", lambda: None)
    with pytest.raises(ConfigError, match="--speculative-config needs the compiled kernels"):
        gram_index.compiled_functions.__wrapped__()
