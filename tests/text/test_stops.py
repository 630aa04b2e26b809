"""Stop strings: the automaton against str.find, and a request's text against a naive search."""

from __future__ import annotations

import itertools
import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.stops import MAX_CACHED, MAX_CACHED_CHARACTERS, ROOT, StopAutomaton, StopCache
from quintet.detokenizer_proc.text_state import TextState
from quintet.detokenizer_proc.vocabulary import Vocabulary
from quintet.wire.codec import pack_i32
from quintet.wire.messages import Open
from quintet.wire.request import Echo


def opened(
    stop: list[str], *, include: bool = False, min_tokens: int = 0, output: tuple[int, ...] = ()
) -> Open:
    ids = pack_i32(output)
    return Open(
        1,
        0,
        0,
        b"",
        stop,
        include,
        True,
        True,
        Echo.NONE,
        False,
        min_tokens,
        0,
        0,
        ids,
        False,
        len(output),
    )


def first_hit(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Return end and start of the earliest occurrence; the longest of those with the same end."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found, default=None)


@settings(deadline=None, derandomize=True)
@given(
    text=st.text("ab c", max_size=40),
    stops=st.lists(st.text("ab c", min_size=1, max_size=5), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_the_automaton_matches_str_find(text: str, stops: list[str], cuts: list[int]) -> None:
    automaton = StopAutomaton(stops)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    node, expected = ROOT, first_hit(text, stops)
    for start, end in itertools.pairwise(edges):
        node, hit = automaton.scan(node, text[start:end], True)
        if hit is not None:
            assert expected is not None
            assert (start + hit.end, start + hit.end - len(hit.stop)) == expected
            return
        held = automaton.hold[node]
        longest = max(
            (k for stop in stops for k in range(len(stop)) if text[:end].endswith(stop[:k])), default=0
        )
        assert held == longest
    assert expected is None


def test_unarmed_hits_are_skipped_and_may_overlap_armed_ones() -> None:
    automaton = StopAutomaton(["aba"])
    node, hit = automaton.scan(ROOT, "aba", False)
    assert hit is None
    assert automaton.hold[node] == 1  # the last "a" may start another hit
    _, hit = automaton.scan(node, "ba", True)
    assert hit is not None and hit.end == 2


def test_the_cache_is_shared_and_bounded() -> None:
    cache = StopCache()
    first = cache.automaton(["x"])
    assert cache.automaton(["x"]) is first
    for i in range(MAX_CACHED):
        cache.automaton([f"s{i}"])
    assert cache.automaton(["x"]) is not first


def test_the_cache_is_bounded_in_characters() -> None:
    cache = StopCache()
    small = cache.automaton(["x"])
    big = [chr(ord("a") + i) * 4096 for i in range(MAX_CACHED_CHARACTERS // 4096)]
    kept = [cache.automaton([stop]) for stop in big]
    assert cache.automaton(big[-1:]) is kept[-1]
    assert cache.automaton(["x"]) is not small
    huge = ["h" * (MAX_CACHED_CHARACTERS + 1)]
    assert cache.automaton(huge) is not cache.automaton(huge)


def lines_run(work: Callable[[], object]) -> int:
    """Return the number of Python lines that ``work`` runs: a cost independent of machine and load."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "stops", [["a" * 4096], ["ab" * 31 + chr(0x4E00 + i) for i in range(64)], ["\u4e00\u4e8c" * 2048]]
)
def test_a_set_of_four_thousand_characters_has_bounded_cost(stops: list[str]) -> None:
    num_characters = sum(map(len, stops))
    assert lines_run(lambda: StopAutomaton(stops)) < 20 * num_characters
    tracemalloc.start()
    try:
        automaton = StopAutomaton(stops)
        assert tracemalloc.get_traced_memory()[0] < 64 * num_characters
    finally:
        tracemalloc.stop()
    text = "x" + stops[-1][:-1] + stops[-1]
    _, hit = automaton.scan(ROOT, text, True)
    assert hit is not None and hit.end == text.index(stops[-1]) + len(stops[-1])


def reference(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Search the whole text after every token."""
    known = ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        if len(text) <= len(known):
            continue
        hits = [
            (at + len(stop), at)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(known)
        ]
        known = text
        if hits and count >= min_tokens:
            end, start = min(hits)
            return text[: end if include else start], text[start:end], count
    return tokenizer.decode(ids), None, len(ids)


@pytest.mark.parametrize("style", ["byte_level", "sentencepiece", "metaspace", "wordpiece"])
def test_random_stop_sets_match_the_naive_search(
    tokenizers_by_style: dict[str, Tokenizer], style: str
) -> None:
    tokenizer = tokenizers_by_style[style]
    table = PieceTable(Vocabulary.of(tokenizer)).skipping_special_tokens()
    rng = random.Random(5)
    words = ["hello", "he", "do", ", ", " ", "world", "a", "b", "😀", "é", "世界", "\n", "the", "?"]
    cache = StopCache()
    num_hits = 0
    for _ in range(1500):
        text = "".join(rng.choices(words, k=rng.randrange(1, 12)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            continue
        whole = tokenizer.decode(ids)
        stops = []
        for _ in range(rng.randrange(1, 4)):
            if rng.random() < 0.7 and whole:
                at = rng.randrange(len(whole))
                stops.append(whole[at : at + rng.randrange(1, 6)])
            else:
                stops.append("".join(rng.choices("helo wd😀", k=rng.randrange(1, 4))))
        include, min_tokens = rng.random() < 0.3, rng.choice((0, 0, 2, 4))
        split = rng.randrange(len(ids)) if rng.random() < 0.2 else 0
        expected = reference(tokenizer, ids, stops, include, min_tokens)
        if expected[1] is not None and expected[2] <= split:
            split = 0
        state = TextState(
            opened(stops, include=include, min_tokens=min_tokens, output=tuple(ids[:split])),
            table,
            cache.automaton(stops) if stops else None,
        )
        got, position = "", split
        restored = state.length
        while position < len(ids) and state.hit is None:
            step = rng.randrange(1, 4)
            offset = state.length
            delta = state.add(ids[position : position + step])
            assert state.length == offset + len(delta)
            got, position = got + delta, position + step
        if state.hit is None:
            got += state.finish()
        where = (ids, stops, include, min_tokens, split)
        assert (expected[0][restored:], *expected[1:]) == (got, state.hit, state.num_tokens), where
        num_hits += state.hit is not None
    assert num_hits > 300


def test_a_stop_string_in_byte_tokens_is_found_immediately(tokenizers_by_style: dict[str, Tokenizer]) -> None:
    """A newline is a byte token there; its run is not complete, but the output may end."""
    tokenizer = tokenizers_by_style["sentencepiece"]
    table = PieceTable(Vocabulary.of(tokenizer)).skipping_special_tokens()
    newline, a = tokenizer.token_to_id("<0x0A>"), tokenizer.token_to_id("a")
    state = TextState(opened(["\n\n"]), table, StopAutomaton(["\n\n"]))
    assert state.add([a, newline]) == "a"
    assert state.add([newline, a]) == ""
    assert (state.hit, state.num_tokens) == ("\n\n", 3)


def test_tentative_characters_that_become_invalid_are_searched_as_replacements(
    tokenizers_by_style: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers_by_style["sentencepiece"]
    table = PieceTable(Vocabulary.of(tokenizer)).skipping_special_tokens()
    ids = [tokenizer.token_to_id(token) for token in ("a", "<0x0A>", "<0xFF>", "b", "c")]
    state = TextState(opened(["\n\ufffd", "\ufffdb"]), table, StopAutomaton(["\n\ufffd", "\ufffdb"]))
    assert state.add(ids) == "a\ufffd"
    assert (state.hit, state.num_tokens) == ("\ufffdb", 4)
