"""Logits processors and filters against a plain implementation of their definitions, one row at a time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.executor.conftest import Drawer, SamplerBench, new_row

from quintet.executor.sampling.draw import choose
from quintet.executor.sampling.logits_processor import (
    AllowedIds,
    BadWords,
    LogitBias,
    LogitsProcessor,
    MinTokens,
)
from quintet.executor.sampling.penalties import Penalties
from quintet.executor.sampling.philox import philox4x32, uniform
from quintet.executor.sampling.settings import (
    NUM_CANDIDATES,
    RECORD,
    Settings,
    cut_min_p,
    cut_top_k,
    cut_top_p,
    divide_by_temperature,
    settings_of,
)
from quintet.executor.slots import Rows
from quintet.wire.codec import pack_i32, pack_u8
from quintet.wire.params import SamplingParams

VOCAB = 300
INF = math.inf
Logits = list[float]


def allowed_reference(logits: Logits, row: Drawer) -> Logits:
    allowed = row.params.allowed_token_ids
    return logits if allowed is None else [v if t in allowed else -INF for t, v in enumerate(logits)]


def bad_words_reference(logits: Logits, row: Drawer) -> Logits:
    out = list(logits)
    for word in row.bad_word_ids:
        prefix = word[:-1]
        if not prefix or row.outputs[-len(prefix) :] == prefix:
            out[word[-1]] = -INF
    return out


def min_tokens_reference(logits: Logits, row: Drawer) -> Logits:
    if len(row.outputs) >= row.params.min_tokens:
        return logits
    return [-INF if t in row.stop_ids else v for t, v in enumerate(logits)]


def logit_bias_reference(logits: Logits, row: Drawer) -> Logits:
    biases = row.params.logit_bias or {}
    return [v + biases.get(t, 0.0) for t, v in enumerate(logits)]


def penalties_reference(logits: Logits, row: Drawer) -> Logits:
    out, p = list(logits), row.params
    for token in set(row.tokens):
        out[token] = (
            out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        )
    for token in set(row.outputs):
        out[token] -= p.frequency_penalty * row.outputs.count(token) + p.presence_penalty
    return out


def temperature_reference(logits: Logits, row: Drawer) -> Logits:
    return [v / row.params.temperature for v in logits]


def probabilities(logits: Logits) -> Logits:
    top = max(logits)
    weights = [math.exp(v - top) for v in logits]
    return [w / math.fsum(weights) for w in weights]


def min_p_reference(logits: Logits, row: Drawer) -> Logits:
    shares = probabilities(logits)
    return [v if s >= row.params.min_p * max(shares) else -INF for v, s in zip(logits, shares, strict=True)]


def top_k_reference(logits: Logits, row: Drawer) -> Logits:
    if not row.params.top_k:
        return logits
    least = sorted(logits, reverse=True)[min(row.params.top_k, len(logits)) - 1]
    return [v if v >= least else -INF for v in logits]


def top_p_reference(logits: Logits, row: Drawer) -> Logits:
    if row.params.top_p == 1.0:
        return logits
    shares = probabilities(logits)
    gathered, least = 0.0, INF
    for t in sorted(range(len(logits)), key=lambda t: -logits[t]):
        if gathered >= row.params.top_p:
            break
        gathered += shares[t]
        least = logits[t]
    return [v if v >= least else -INF for v in logits]


def drawers(seed: int, count: int = 24) -> list[Drawer]:
    """Return rows with random sampling parameters, many of them default."""
    draw = random.Random(seed)

    def ids(most: int) -> list[int]:
        return draw.sample(range(VOCAB), draw.randrange(1, most))

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if draw.random() < 0.6 else otherwise

    rows = []
    for i in range(count):
        outputs = [draw.randrange(8) for _ in range(draw.choice([0, 1, 2, 5, 20]))]
        tails = [outputs[-n:] for n in (1, 2, 3) if len(outputs) >= n]
        rows.append(
            Drawer(
                SamplingParams(
                    temperature=maybe(0.2 + draw.random(), 1.0),
                    top_k=maybe(draw.choice([1, 2, 17, VOCAB, 10 * VOCAB]), 0),
                    top_p=maybe(draw.choice([0.01, 0.5, 0.9, 0.999]), 1.0),
                    min_p=maybe(draw.choice([0.02, 0.3, 1.0]), 0.0),
                    repetition_penalty=maybe(draw.choice([0.7, 1.3]), 1.0),
                    presence_penalty=maybe(draw.uniform(-2, 2), 0.0),
                    frequency_penalty=maybe(draw.uniform(-2, 2), 0.0),
                    min_tokens=maybe(draw.randrange(10), 0),
                    max_tokens=None,
                    logit_bias=maybe({token: draw.uniform(-9, 9) for token in ids(9)}, None),
                    allowed_token_ids=maybe(ids(120), None),
                ),
                prompt=[draw.randrange(VOCAB) for _ in range(1 + i)],
                outputs=outputs,
                seed=draw.getrandbits(64),
                stop_ids=maybe(ids(5), []),
                bad_word_ids=maybe(
                    [
                        [*draw.choice(tails or [[]]), draw.randrange(VOCAB)],
                        [*ids(4)],
                        [draw.randrange(VOCAB)],
                    ],
                    [],
                ),
            )
        )
    return rows


PROCESSORS: list[tuple[Callable[[int], LogitsProcessor], Callable[[Logits, Drawer], Logits]]] = [
    (AllowedIds, allowed_reference),
    (BadWords, bad_words_reference),
    (MinTokens, min_tokens_reference),
    (LogitBias, logit_bias_reference),
    (Penalties, penalties_reference),
]

FILTERS: list[tuple[Callable[[torch.Tensor, Settings], None], Callable[[Logits, Drawer], Logits]]] = [
    (divide_by_temperature, temperature_reference),
    (cut_min_p, min_p_reference),
    (cut_top_k, top_k_reference),
    (cut_top_p, top_p_reference),
]


def settings_for(rows: list[Drawer]) -> Settings:
    return np.array([settings_of(row.params, row.seed) for row in rows], RECORD)


def float_logits(rows: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * scale


@pytest.mark.parametrize(("make", "reference"), PROCESSORS, ids=[make.__name__ for make, _ in PROCESSORS])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_logits_processor_equals_its_definition(
    make: Callable[[int], LogitsProcessor], reference: Callable[[Logits, Drawer], Logits], seed: int
) -> None:
    bench, rows = SamplerBench(VOCAB), drawers(seed)
    drawing = bench.draw_rows(bench.admit(rows))
    concern = make(64)
    needs_processing = [
        concern.admit(new_row(int(slot), row)) for slot, row in zip(drawing.slots, rows, strict=True)
    ]
    which = np.flatnonzero(needs_processing)
    assert len(which) > 0
    logits = float_logits(len(rows), seed, scale=[3.0, 0.3, 8.0][seed])
    expected = torch.tensor(
        [reference(values, row) for values, row in zip(logits.tolist(), rows, strict=True)]
    )
    concern.apply(logits, drawing, which)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("apply", "reference"), FILTERS, ids=[apply.__name__ for apply, _ in FILTERS])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_filter_equals_its_definition(
    apply: Callable[[torch.Tensor, Settings], None],
    reference: Callable[[Logits, Drawer], Logits],
    seed: int,
) -> None:
    rows = drawers(seed)
    logits = float_logits(len(rows), seed, scale=[3.0, 0.3, 8.0][seed])
    before = logits.clone()
    expected = torch.tensor(
        [reference(values, row) for values, row in zip(logits.tolist(), rows, strict=True)]
    )
    apply(logits, settings_for(rows))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(logits, before), "the filter applies to no row"


def test_top_p_of_a_nearly_flat_row_keeps_its_threshold() -> None:
    """A nearly flat row needs more than the first candidates; adjacent rows do not change its result."""
    row = Drawer(SamplingParams(top_p=0.9))
    flat, peaked = float_logits(1, 0, scale=0.01), float_logits(1, 1, scale=9.0)
    both = torch.cat((flat, peaked))
    expected = torch.tensor([top_p_reference(values, row) for values in both.tolist()])
    cut_top_p(both, settings_for([row, row]))
    torch.testing.assert_close(both, expected)
    assert both[0].isfinite().sum() > NUM_CANDIDATES > both[1].isfinite().sum()


@pytest.mark.parametrize("seed", range(5))
def test_greedy_rows_take_the_most_likely_token_after_processing(seed: int) -> None:
    rows = drawers(seed)
    for row in rows:
        row.params = SamplingParams(
            temperature=0.0,
            repetition_penalty=row.params.repetition_penalty,
            presence_penalty=row.params.presence_penalty,
            frequency_penalty=row.params.frequency_penalty,
            logit_bias=row.params.logit_bias,
            allowed_token_ids=row.params.allowed_token_ids,
            min_tokens=row.params.min_tokens,
            max_tokens=None,
        )
    logits = float_logits(len(rows), seed)
    expected = []
    for values, row in zip(logits.tolist(), rows, strict=True):
        shaped = values
        for _, reference in PROCESSORS:
            shaped = reference(shaped, row)
        expected.append(max(range(VOCAB), key=lambda t, shaped=shaped: (shaped[t], -t)))
    before = logits.clone()
    drawn, _ = SamplerBench(VOCAB).draw(rows, logits)
    assert drawn == expected
    assert torch.equal(logits, before), "raw logits must be kept for log-probabilities"


def test_logits_are_processed_only_for_rows_that_need_it() -> None:
    bench = SamplerBench(VOCAB)
    plain, biased = Drawer(SamplingParams()), Drawer(SamplingParams(logit_bias={3: 1.0}), prompt=[1] * 9)
    reporting = Drawer(SamplingParams(prompt_logprobs=1), prompt=[1] * 9)
    everyone = bench.admit([plain, biased, reporting], slots=[4, 2, 7])

    def needs_processing(slots: list[int], starts: list[int], counts: list[int], samples: list[int]) -> bool:
        columns = {"slots": pack_i32(slots), "starts": pack_i32(starts), "counts": pack_i32(counts)}
        plan = msgspec.structs.replace(everyone.plan, samples=pack_u8(samples), **columns)
        return bench.sampler.needs_logits(Rows(plan))

    assert not needs_processing([4], [2], [1], [1])
    assert needs_processing([4, 2], [2, 8], [1, 1], [1, 1])
    assert not needs_processing([4, 2], [2, 3], [1, 4], [1, 0]), "a chunk of a prompt draws nothing"
    assert needs_processing([4, 7], [2, 3], [1, 4], [1, 0]), "prompt log-probabilities may be reported"
    assert needs_processing([7], [7], [2], [1])
    assert not needs_processing([4, 7], [2, 9], [1, 1], [1, 1]), "the prompt has ended"
    bench.admit([plain, plain], slots=[2, 7])
    assert not needs_processing([4, 2, 7], [2, 3, 3], [1, 1, 1], [1, 1, 1])


@pytest.mark.parametrize("seed", range(3))
def test_a_draw_does_not_depend_on_the_batch(seed: int) -> None:
    rows, logits = drawers(seed), float_logits(24, seed)
    for row in rows[::5]:
        row.params = SamplingParams(temperature=0.0)
    together, _ = SamplerBench(VOCAB).draw(rows, logits)
    alone = [SamplerBench(VOCAB).draw([row], logits[i : i + 1])[0][0] for i, row in enumerate(rows)]
    backwards, _ = SamplerBench(VOCAB).draw(rows[::-1], logits.flip(0))
    assert together == alone == backwards[::-1]


def test_a_draw_depends_on_seed_and_position() -> None:
    flat = torch.zeros(64, VOCAB)
    by_seed, _ = SamplerBench(VOCAB).draw([Drawer(SamplingParams(), seed=i) for i in range(64)], flat)
    by_position, _ = SamplerBench(VOCAB).draw(
        [Drawer(SamplingParams(), prompt=[0] * (1 + i % 60)) for i in range(60)], flat[:60]
    )
    assert len(set(by_seed)) > 45
    assert len(set(by_position)) > 45


def test_a_row_without_allowed_tokens_draws_a_token() -> None:
    """A user can forbid every token; the batch must survive."""
    hopeless = SamplingParams(allowed_token_ids=[7], min_tokens=4, max_tokens=None)
    drawn, _ = SamplerBench(VOCAB).draw(
        [Drawer(hopeless, stop_ids=[7]), Drawer(SamplingParams(allowed_token_ids=[9]))], float_logits(2, 0)
    )
    assert drawn == [0, 9]


def test_philox_known_answers() -> None:
    """Known-answer tests of Random123, the reference implementation (philox4x32, 10 rounds)."""
    words = philox4x32(np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    assert [int(word[0]) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniforms_lie_inside_the_open_interval() -> None:
    values = uniform(np.arange(1000, dtype=np.uint64), np.arange(1000))
    assert 0.0 < values.min() < 0.01
    assert 0.99 < values.max() < 1.0


@pytest.mark.parametrize("vocab_size", [1, 5, 128, 129, 300, 1000])
def test_the_draw_inverts_the_cumulative_distribution(vocab_size: int) -> None:
    logits = torch.randn(200, vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, ::3] = -torch.inf
    if vocab_size == 1:
        logits[:] = 0.0
    uniforms = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms[:2] = torch.tensor([2.0**-53, 1 - 2.0**-53])
    drawn = choose(logits, uniforms)
    shares = torch.softmax(logits.double(), -1)
    above = shares.cumsum(-1).gather(1, drawn[:, None]).squeeze(1)
    own = shares.gather(1, drawn[:, None]).squeeze(1)
    assert (own > 0).all()
    assert (uniforms <= above + 1e-6).all()
    assert (uniforms >= above - own - 1e-6).all()
