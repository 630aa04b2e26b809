"""The mock worker: deterministic tokens, plain words, step duration, no import of torch."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from tests.executor.conftest import Drawer, new_row, plan_of

from quintet.executor.mock import MockWorker, plain_ids
from quintet.wire.codec import unpack_f32, unpack_i32
from quintet.wire.errors import ConfigError
from quintet.wire.params import SamplingParams

VOCAB = 6000
EOS = [2, 4000]


def mock(step_s: float = 0.0) -> MockWorker:
    return MockWorker(256, VOCAB, EOS, num_blocks=10, step_s=step_s)


def drawers(count: int, length: int = 1) -> list[Drawer]:
    return [Drawer(SamplingParams(), prompt=[0] * length, seed=i) for i in range(count)]


def test_a_token_depends_on_seed_and_position_only() -> None:
    together = unpack_i32(mock().execute(plan_of(drawers(8), list(range(8)))).token_ids)
    alone = [
        unpack_i32(mock().execute(plan_of([row], [200 - i])).token_ids)[0] for i, row in enumerate(drawers(8))
    ]
    later = unpack_i32(mock().execute(plan_of(drawers(8, length=2), list(range(8)))).token_ids)
    assert list(together) == alone
    assert list(together) != list(later)
    assert len(set(together)) > 1


def test_mock_draws_plain_words_and_no_end_token() -> None:
    worker, seen = mock(), set()
    for length in range(1, 200):
        seen |= set(unpack_i32(worker.execute(plan_of(drawers(256, length), list(range(256)))).token_ids))
    assert seen <= set(range(VOCAB // 2, VOCAB * 15 // 16))
    assert not seen & set(EOS)
    assert len(seen) > 2000


def test_negative_seeds_are_accepted() -> None:
    row = Drawer(SamplingParams(), seed=-5)
    assert len(unpack_i32(mock().execute(plan_of([row], [0])).token_ids)) == 1


def test_a_vocabulary_without_plain_ids_is_rejected() -> None:
    with pytest.raises(ConfigError, match="plain token id"):
        plain_ids(2, [0, 1])


def test_a_step_lasts_the_configured_time() -> None:
    worker, plan = mock(step_s=0.02), plan_of(drawers(4), list(range(4)))
    started = time.perf_counter()
    for _ in range(5):
        worker.execute(plan)
    assert time.perf_counter() - started >= 0.1


def test_logprobs_shapes() -> None:
    row = Drawer(SamplingParams(logprobs=3, prompt_logprobs=1), prompt=[5, 6, 7])
    plan = plan_of([row], [9])
    plan.starts, plan.counts = np.zeros(1, np.int32).tobytes(), np.full(1, 3, np.int32).tobytes()
    result = mock().execute(plan)
    (report,), (prompt,) = result.logprobs, result.prompt_logprobs
    assert len(unpack_i32(report.token_ids)) == len(unpack_f32(report.logprobs)) == 4
    assert unpack_i32(report.token_ids)[0] == unpack_i32(result.token_ids)[0]
    assert (prompt.first, prompt.width) == (1, 2)
    assert list(unpack_i32(prompt.token_ids)[::2]) == [6, 7]


def test_reset_clears_logprobs_requests() -> None:
    worker = mock()
    worker.execute(plan_of([Drawer(SamplingParams(logprobs=1))], [0]))
    worker.reset()
    plan = plan_of([Drawer(SamplingParams())], [0])
    plan.new_rows = [new_row(0, Drawer(SamplingParams()))]
    assert not worker.execute(plan).logprobs


def test_executor_loop_and_mock_do_not_import_torch() -> None:
    code = "import sys, quintet.executor.main, quintet.executor.mock; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
