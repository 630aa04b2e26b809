"""Draft tokens of prompt lookup and suffix decoding, for given tokens of requests."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quintet.executor.slots import SlotTables
from quintet.executor.speculation.drafters import DRAFTERS, DraftRows, SuffixDrafter
from quintet.executor.speculation.gram_index import GramIndex
from quintet.executor.speculation.output_cache import END
from quintet.wire.codec import pack_i32
from quintet.wire.config import SpeculativeConfig
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan

STOP = 99


class Requests:
    """Requests in the slots of one drafter."""

    def __init__(self, method: str, **config: Any) -> None:
        self.tables = SlotTables(3, 3000, full_layers(1, 1, 16, 4, 16), torch.device("cpu"))
        self.drafter = DRAFTERS[method](
            msgspec.convert({"method": method, **config}, SpeculativeConfig), self.tables
        )

    def begin(self, slot: int, prompt: list[int], known: list[int] | None = None, scope: int = 0) -> None:
        """Admit a request to a slot; ``known`` are its prompt and outputs after a preemption."""
        tokens = known or prompt
        self.tables.token_ids[slot, : len(tokens)] = torch.tensor(tokens)
        row = NewRow(
            slot, 1, slot, pack_i32(tokens), len(prompt), SamplingParams(), 0, [STOP], draft_scope=scope
        )
        self.drafter.note(StepPlan(1, 0, b"", [row], b"", b"", b"", b"", b"", b""))

    def drafts(self, slot: int, tokens: list[int], most: int = 8) -> list[int]:
        """Return the drafts after the given number of known tokens."""
        self.tables.token_ids[slot, : len(tokens)] = torch.tensor(tokens)
        rows = DraftRows(np.array([slot]), np.array([len(tokens)]), np.array([most]))
        (drafts,) = self.drafter.propose(rows)
        return list(map(int, drafts))

    def serve(self, output: list[int], scope: int = 0, prompt: tuple[int, ...] = (50,)) -> None:
        """Run a request from start to end."""
        self.begin(2, list(prompt), scope=scope)
        tokens = [*prompt, *output]
        self.tables.token_ids[2, : len(tokens)] = torch.tensor(tokens)
        self.drafter.end(2, len(tokens))

    def drafted(self, tokens: list[int], scope: int = 0, most: int = 8) -> list[int]:
        """Return the drafts of a new request with this prompt."""
        self.begin(0, tokens, scope=scope)
        return self.drafts(0, tokens, most)


@pytest.mark.parametrize(
    ("tokens", "shortest", "expected"),
    [
        ([1, 2, 3, 9, 8, 7, 4, 3, 5, 1, 2, 3], 1, [9, 8, 7]),
        ([3, 6, 3, 5, 1, 3], 1, [5, 1, 3]),
        ([3, 6, 3, 5, 1, 3], 2, []),
        ([5, 5, 5], 1, [5, 5, 5]),
        ([5], 1, []),
        ([1, 2], 1, []),
    ],
)
def test_prompt_lookup_prefers_the_longest_then_the_last_occurrence(
    tokens: list[int], shortest: int, expected: list[int]
) -> None:
    requests = Requests("ngram", prompt_lookup_min=shortest, prompt_lookup_max=3)
    assert requests.drafted(tokens, most=3) == expected


def test_prompt_lookup_in_a_growing_request() -> None:
    requests, tokens = Requests("ngram"), list(range(100, 1600))
    requests.begin(0, tokens)
    assert requests.drafts(0, tokens) == []
    tokens += [103, 104]
    assert requests.drafts(0, tokens, 3) == [105, 106, 107]
    tokens += list(range(5000, 6000))
    tokens += [5998, 5999]
    assert requests.drafts(0, tokens, 3) == [5998, 5999, 5998]


@pytest.mark.parametrize("method", DRAFTERS)
def test_slot_forgets_its_last_request(method: str) -> None:
    requests = Requests(method, suffix_decoding_max_cached_requests=0)
    assert requests.drafted([1, 2, 3, 4, 1, 2, 3], most=1) == [4]
    requests.drafter.end(0, 7)
    assert requests.drafted([6, 5, 1, 2, 3]) == []


def test_suffix_decoding_drafts_as_many_tokens_as_match() -> None:
    requests = Requests("suffix")
    text = list(range(100, 160))
    assert requests.drafted([*text, 7, 103, 104, 105]) == [106, 107, 108]
    assert requests.drafted([*text, 7, 103]) == [104]
    assert requests.drafted([*text, *text[:40]], most=32) == text[40:52]
    wide = Requests("suffix", suffix_decoding_max_spec_factor=2.5, suffix_decoding_max_tree_depth=10)
    assert wide.drafted([*text, 7, 103, 104]) == text[5:10]
    assert wide.drafted([*text, *text[:30]], most=32) == text[30:37]


def test_most_frequent_continuation_is_drafted() -> None:
    requests = Requests("suffix", suffix_decoding_min_token_prob=0.5)
    assert requests.drafted([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]) == [3, 1]
    assert requests.drafted([1, 2, 3, 1, 2, 4, 1, 2]) == [4, 1]
    requests = Requests("suffix", suffix_decoding_min_token_prob=0.6)
    assert requests.drafted([1, 2, 3, 1, 2, 4, 1, 2]) == []


def test_outputs_of_earlier_requests_are_drafted() -> None:
    requests = Requests("suffix")
    requests.serve([5, 6, 7, 8, 9])
    assert requests.drafted([30, 5, 6]) == [7, 8]
    assert requests.drafted([40, 50]) == [5]


def test_prompts_of_earlier_requests_are_not_drafted() -> None:
    requests = Requests("suffix")
    requests.serve([5, 6, 7], prompt=tuple(range(10, 40)))
    assert requests.drafted([1, 12, 13]) == []
    assert requests.drafted([1, 39, 5]) == [6, 7]


def test_source_with_more_expected_drafts_is_used() -> None:
    requests = Requests("suffix")
    requests.serve([4, 5, 6, 7, 8, 9])
    assert requests.drafted([6, 1, 2, 4, 5, 6]) == [7, 8, 9]
    assert requests.drafted([4, 5, 6, 1, 2, 3, 4, 5, 6]) == [1, 2, 3]


def test_cached_outputs_are_separate_by_scope() -> None:
    requests = Requests("suffix")
    requests.serve([5, 6, 7, 8, 9], scope=1 << 63)
    assert requests.drafted([30, 5, 6]) == []
    assert requests.drafted([30, 5, 6], scope=3) == []
    assert requests.drafted([30, 5, 6], scope=1 << 63) == [7, 8]


def test_tokens_after_a_stop_token_are_not_cached() -> None:
    requests = Requests("suffix")
    requests.serve([5, 6, STOP, 7, 8])
    assert requests.drafted([30, 5, 6]) == [STOP]
    assert requests.drafted([30, STOP]) == []


def test_preempted_request_is_cached_in_parts() -> None:
    requests, tokens = Requests("suffix"), [50, 5, 6, 7]
    requests.serve(tokens[1:])
    requests.begin(2, [50], known=tokens)
    requests.drafts(2, [*tokens, 8, 9])
    requests.drafter.end(2, 6)
    cache = requests.drafter.output_cache
    assert cache is not None and cache.num_requests == 2
    assert requests.drafted([30, 6, 7]) == [8, 9]


def test_oldest_output_is_evicted() -> None:
    requests = Requests("suffix", suffix_decoding_max_cached_requests=2)
    for begin in (100, 200, 300):
        requests.serve(list(range(begin, begin + 9)))
    cache = requests.drafter.output_cache
    assert cache is not None and (cache.num_requests, cache.num_evicted) == (2, 1)
    assert requests.drafted([30, 101, 102]) == [] and requests.drafted([30, 201, 202]) == [203, 204]


def most_frequent(texts: list[list[int]], most: int, min_probability: float) -> tuple[list[int], float]:
    """Return the most frequent continuation of texts, newest first, and the sum of its probabilities."""
    drafts, probability, score = list[int](), 1.0, 0.0
    while texts and len(drafts) < most:
        column = [text[len(drafts)] for text in texts]
        draft = max(column, key=column.count)
        probability *= column.count(draft) / len(column)
        if draft == END or probability < min_probability:
            break
        texts = [text for text, token in zip(texts, column, strict=True) if token == draft]
        drafts.append(draft)
        score += probability
    return drafts, score


def repeated(text: list[int], begin: int, most: int) -> list[int]:
    """Return the tokens of a text from a place on, which repeat at its end."""
    return (text[begin : begin + most] * most)[:most]


@pytest.mark.parametrize("seed", range(30))
def test_compiled_drafts_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    vocabulary, least = rng.choice([2, 4, 30]), rng.choice([0.0, 0.1, 0.4])
    requests = Requests(
        "suffix",
        suffix_decoding_min_token_prob=least,
        suffix_decoding_max_spec_factor=1.5,
        suffix_decoding_corpus_tokens=200,
    )
    for _ in range(rng.randrange(8)):
        requests.serve(
            [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))], scope=rng.randrange(2)
        )
    drafter, cache = requests.drafter, requests.drafter.output_cache
    assert isinstance(drafter, SuffixDrafter) and cache is not None
    limits = np.maximum.accumulate([0, *(min(int(1.5 * length), 24 - length) for length in range(1, 24))])
    for _ in range(20):
        tokens = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 300))]
        most, scope = rng.randrange(1, 33), rng.randrange(2)
        drafts = requests.drafted(tokens, scope, most)
        context = np.array(tokens[-23:], np.int32)
        own = GramIndex(np.array(tokens, np.int32), (1, 2, 4, 8), 23)
        own.add(1, len(tokens), 0)
        sources = [(tokens, own.find(context))]
        ring = cache.index.tokens.tolist()
        sources += [(ring, cache.index.find(context, scope, cache.oldest))]
        expected = [
            most_frequent(
                [repeated(text, place % len(text), most) for place in found.places],
                min(most, int(limits[found.length])),
                least,
            )
            for text, found in sources
        ]
        assert drafts == max(expected, key=lambda each: each[1])[0]
