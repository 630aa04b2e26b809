"""Reasoning budgets: the forced token, against a plain reading of the outputs, and no cost for other requests."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.executor.conftest import Drawer, SamplerBench

from quintet.executor.sampling import thinking
from quintet.executor.slots import Rows
from quintet.wire.params import SamplingParams, Thinking, ThinkingBound
from quintet.wire.step import StepPlan

VOCAB = 40
ONE = [Thinking([5], [6])]
TWO = [Thinking([5, 7], [6, 8, 9]), Thinking([4], [6])]


def params_of(budget: int, ways: list[Thinking] = ONE, start: int | None = None) -> SamplingParams:
    closes = [[6], [8, 8]] if ways is ONE else [[6, 8], [3]]
    return SamplingParams(temperature=0.0, thinking_bound=ThinkingBound(budget, ways, closes, start))


def place(outputs: list[int], mark: list[int], begin: int = 0) -> int | None:
    """Return the first position of a marker."""
    places = range(begin, len(outputs) - len(mark) + 1)
    return next((i for i in places if outputs[i : i + len(mark)] == mark), None)


def forced(drawer: Drawer) -> int | None:
    """Return the token that must be drawn next, from a scan of the outputs."""
    bound = drawer.params.thinking_bound
    assert bound is not None
    outputs = drawer.outputs
    found = [(at, i) for i, way in enumerate(bound.formats) if (at := place(outputs, way.opens)) is not None]
    at, way = min(found, default=(None, 0))
    if bound.open_format is not None:
        way, begin = bound.open_format, len(bound.formats[min(found)[1]].opens) if at == 0 else 0
    elif at is None:
        return None
    else:
        begin = at + len(bound.formats[way].opens)
    thought = outputs[: begin + bound.max_tokens]
    if any(place(thought, close, begin) is not None for close in bound.closes):
        return None
    number = len(outputs) - begin - bound.max_tokens
    return bound.formats[way].forced[number] if 0 <= number < len(bound.formats[way].forced) else None


def test_the_end_is_forced_when_the_budget_is_used() -> None:
    draw = random.Random(7)
    bench = SamplerBench(VOCAB)
    num_forced = 0
    for _ in range(6):
        drawers = []
        for _ in range(64):
            ways = draw.choice((ONE, TWO))
            outputs = draw.choices([1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 1, 2, 6, 1, 2, 2], k=draw.randrange(10))
            start = draw.choice((None, 0, len(ways) - 1))
            drawers.append(Drawer(params_of(draw.randrange(5), ways, start), outputs=outputs))
        logits = torch.randn((len(drawers), VOCAB), generator=torch.Generator().manual_seed(1))
        plain = logits.argmax(dim=1).tolist()
        wanted = [forced(drawer) for drawer in drawers]
        num_forced += sum(token is not None for token in wanted)
        drawn, _ = bench.draw(drawers, logits)
        assert drawn == [own if token is None else token for own, token in zip(plain, wanted, strict=True)]
        again, _ = bench.draw(drawers[::-1], logits.flip(0))
        assert again == drawn[::-1]
    assert num_forced > 40


def test_a_response_step_by_step() -> None:
    """One growing request in a slot; the start of its reasoning is found on the way."""
    for start, budget, written in ((None, 3, [1, 5]), (0, 2, []), (0, 0, []), (None, 0, [5])):
        bench = SamplerBench(VOCAB)
        drawer = Drawer(params_of(budget, ONE, start))
        rows = bench.admit([drawer], [4])
        logits = torch.zeros((1, VOCAB))
        expected = [*written, *[2] * budget, 6, *[2] * 5]
        for position, token in enumerate(expected):
            own = written[position] if position < len(written) else 2
            logits.zero_()
            logits[0, own] = 9.0
            assert bench.sampler.draw(rows, logits)[0].tolist() == [token], (start, position)
            rows = moved(rows)


def test_a_late_start_is_found_without_scanning_all_outputs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, draw = SamplerBench(VOCAB), random.Random(11)
    widths = []
    matches = thinking._matches
    monkeypatch.setattr(
        thinking, "_matches", lambda tokens, mark: widths.append(tokens.shape[1]) or matches(tokens, mark)
    )
    written = [
        [draw.choice((1, 2, 7, 8)) for _ in range(begin)] + opens
        for begin, opens in ((40, [5, 7]), (44, [4]), (47, [5, 1, 4]))
    ]
    drawers = [Drawer(params_of(budget, TWO)) for budget in (0, 2, 5)]
    rows = bench.admit(drawers, [4, 2, 9])
    for position in range(60):
        own = [outputs[position] if position < len(outputs) else 1 for outputs in written]
        wanted = [forced(drawer) for drawer in drawers]
        drawn = bench.sampler.draw(rows, 9.0 * torch.eye(VOCAB)[own])[0].tolist()
        assert drawn == [plain if token is None else token for plain, token in zip(own, wanted, strict=True)]
        for drawer, token in zip(drawers, drawn, strict=True):
            drawer.outputs.append(token)
        rows = moved(rows)
    assert [drawer.outputs[-1] for drawer in drawers] == [1, 1, 1]
    assert max(widths) < 16


def test_only_steps_that_may_force_a_token_are_processed() -> None:
    bench = SamplerBench(VOCAB)
    other = Drawer(SamplingParams(temperature=0.0))
    rows = bench.admit([Drawer(params_of(3, ONE, 0)), other], [4, 9])
    pays = []
    for _ in range(12):
        pays.append(bench.sampler.needs_logits(rows))
        bench.sampler.draw(rows, torch.eye(VOCAB)[:2])
        rows = moved(rows)
    assert pays == [*[False] * 3, *[True] * 1, *[False] * 8]


def test_a_forced_token_overrides_other_processors() -> None:
    bench = SamplerBench(VOCAB)
    params = params_of(1, ONE, 0)
    params.allowed_token_ids, params.logit_bias = [1, 2], {6: -100.0}
    drawn, _ = bench.draw([Drawer(params, outputs=[1])], torch.eye(VOCAB)[:1])
    assert drawn == [6]


def moved(rows: Rows) -> Rows:
    """Return the same rows one token later."""
    plan = rows.plan
    starts = np.frombuffer(plan.starts, np.int32) + 1
    return Rows(
        StepPlan(
            step=plan.step + 1,
            sent_ns=0,
            freed=b"",
            new_rows=[],
            blocks=b"",
            copies=b"",
            slots=plan.slots,
            starts=starts.astype(np.int32).tobytes(),
            counts=plan.counts,
            samples=plan.samples,
        )
    )
