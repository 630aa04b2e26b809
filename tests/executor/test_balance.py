"""Work division among many threads, as `bench.distributed.thread_balance` computes it without running the layers."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.distributed.thread_balance import STEPS, balance
from bench.kernels.op_balance import OpBalance, balance_of
from bench.step import SHAPES, Setup, config_of

from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.registry import make_worker
from quintet.executor.worker import Worker

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")


@pytest.fixture(scope="module", params=[name for name in SHAPES if "num_experts" not in SHAPES[name]])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """A known shape: its layers are linear ones."""
    return worker_of(SHAPES[request.param], tmp_path_factory.mktemp(request.param))


def worker_of(shape: dict[str, object], folder: Path) -> Worker:
    """Return a worker with one layer and a small vocabulary: the division does not depend on the number of layers."""
    hf_config = shape | {"num_hidden_layers": 1, "vocab_size": 1024}
    setup = Setup(rows=[32], context=2048, new=1, repetitions=0)
    return make_worker(config_of(folder, hf_config, setup))


@pytest.mark.parametrize("step", STEPS)
def test_linear_layers_keep_64_threads_busy(worker: Worker, step: str) -> None:
    rows, before, new = STEPS[step]
    runner = worker.runner
    assert isinstance(runner, ProgramRunner)
    costs = []
    for threads in (1, 2, 64, 300):
        operations = balance_of(runner, [before] * rows, [new] * rows, threads)
        layers = [each for each in operations if each.name.startswith("linear") and each.bytes]
        logits = layers.pop()  # a smaller vocabulary than any model has
        assert len(layers) == 4
        costs.append(sum(each.cost for each in layers))
        assert all(each.takes <= each.pieces and each.busiest * threads >= each.cost for each in layers)
        if threads <= 64:
            assert balance(layers, threads) >= 0.92
            # Output layers of usual size reach 0.92 and more: `bench.distributed.thread_balance`.
            assert balance([each for each in operations if each.name != logits.name], threads) >= 0.91
    # Threads change the division, not the amount of work. A panel of few rows costs as much as reading the weight.
    assert max(costs) <= 1.01 * min(costs)


def test_each_panel_reads_a_prompt_row_again(worker: Worker) -> None:
    runner = worker.runner
    assert isinstance(runner, ProgramRunner)
    decode, prompt = (balance_of(runner, [0], [new], 2) for new in (1, 2048))
    for one, many in zip(decode, prompt, strict=True):
        if one.name.startswith("linear"):
            assert one.bytes_again == 0
            assert many.bytes - many.bytes_again == one.bytes
            assert not one.bytes or "1024" in one.name or many.bytes_again > 0


def test_decode_with_few_kv_heads_keeps_64_threads_busy(worker: Worker) -> None:
    """Scores are divided by keys and, after a wait, values by columns; neither where the gain is small."""
    runner = worker.runner
    assert isinstance(runner, ProgramRunner)

    def attention(context: int, threads: int, rows: int = 1) -> list[OpBalance]:
        operations = balance_of(runner, [context] * rows, [1] * rows, threads)
        return [each for each in operations if each.name.startswith("attention") and each.pieces]

    for context in (255, 2047):
        [whole] = attention(context, 2)
        scores, values = parts = attention(context, 64)
        assert scores.cost == values.cost == whole.cost // 2
        assert scores.bytes == values.bytes == whole.bytes // 2
        assert sum(each.bytes_again for each in (whole, *parts)) == 0
        assert sum(each.busiest for each in parts) * 3 < whole.busiest
    assert len(attention(15, 64)) == len(attention(255, 64, rows=32)) == 1


def test_threads_share_the_query_heads_of_one_kv_head(tmp_path: Path) -> None:
    runner = worker_of(SHAPES["M"] | {"num_key_value_heads": 1}, tmp_path).runner
    assert isinstance(runner, ProgramRunner)

    def attention(context: int, threads: int) -> OpBalance:
        operations = balance_of(runner, [context], [1], threads)
        return next(each for each in operations if each.name.startswith("attention"))

    alone, shared, few = attention(255, 1), attention(255, 2), attention(15, 2)
    assert (alone.pieces, shared.pieces, few.pieces) == (1, 2, 1)
    assert shared.cost == 2 * shared.busiest == alone.cost
    assert shared.bytes_again == alone.bytes > alone.bytes_again == 0


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_drafts_of_a_row_read_its_context_once(tmp_path: Path, threads: int) -> None:
    """Nine tokens of seven query heads each exceed a group of tokens. Threads divide the keys, not the tokens.

    Without VDPBF16PS on AMD: there groups follow each other in a core's cache (``bench/notes/050-drafts-attention.md``).
    """
    library = open_library()
    assert library is not None
    library.qt_attend_in_pairs(0)
    try:
        runner = worker_of(SHAPES["S"], tmp_path).runner
        assert isinstance(runner, ProgramRunner)
        operations = balance_of(runner, [2039], [9], threads)
    finally:
        library.qt_attend_in_pairs(-1)
    attention = next(each for each in operations if each.name.startswith("attention") and each.pieces)
    assert attention.bytes_again == 0
    assert attention.busiest * threads <= 1.05 * attention.cost
