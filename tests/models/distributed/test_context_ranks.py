"""Ranks with shared KV (decode context parallelism) compute the bits of ranks with a copy each."""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path
from unittest import mock

import pytest
from bench.kernels.op_balance import balance_of
from tests.models.distributed import layouts_of_rows as layouts
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import (
    GREEDY,
    SCHEDULES,
    Dtype,
    Loaded,
    alone,
    few_blocks,
    load,
    run,
    run_schedules,
    with_blocks,
)
from tests.models.random_checkpoints import of_transformers, write_checkpoint
from tests.models.rows import latent
from tests.models.test_engine import CoreAndWorker, changed
from tests.models.test_equal import ROWS, check_tokens, made

from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.distributed.parallel.library import OrderKind
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.worker import Worker
from quintet.wire.config import KvCacheDtype
from quintet.wire.params import SamplingParams

FAST = (("llama", 4, 2), ("deepseek v3", 2, 2), ("deepseek v3", 4, 2), ("deepseek v3", 4, 4))
"""Of two KV heads, each read by two of four ranks; latents, read by all."""


def check_bits_of_copies(
    folder: Path, prompts: list[list[int]], size: int, context: int, kv: KvCacheDtype = "auto"
) -> None:
    """Compare the logits of each token with those of ranks with copies, in every schedule."""
    dtype = "float32" if kv == "auto" else "bfloat16"
    with in_ranks(folder, size, dtype, kv_cache_dtype=kv) as loaded:
        expected = alone(loaded, prompts).bits
    with in_ranks(folder, size, dtype, kv_cache_dtype=kv, context=context) as loaded:
        for schedule, outcome in run_schedules(loaded, prompts, True, SCHEDULES):
            differing = [key for key, bits in outcome.bits.items() if expected[key] != bits]
            assert not differing, (schedule, size, context, differing[:3])


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "size", "context"), FAST)
def test_tokens_equal_those_of_one_process(name: str, size: int, context: int, tmp_path: Path) -> None:
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, context=context) as loaded:
        check_tokens(loaded, ROWS[name], expected, {"preemption": SCHEDULES["preemption"]})


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "size", "context"),
    [(name, *ranks) for ranks, names in layouts.KEPT_TOGETHER.items() for name in names],
)
def test_every_supported_family_has_the_bits_of_copies(
    name: str, size: int, context: int, tmp_path: Path
) -> None:
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, context=context) as loaded:
        check_tokens(loaded, ROWS[name], expected, SCHEDULES)
    check_bits_of_copies(tmp_path, [each.prompt for each in expected], size, context)


@pytest.mark.whole
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize(("name", "size", "context"), FAST)
def test_every_format_of_kv_has_the_bits_of_copies(
    name: str, size: int, context: int, kv: KvCacheDtype, tmp_path: Path
) -> None:
    if kv == "int4" and name != "llama":
        pytest.skip("an int4 cache stores no latents")
    prompts = [each.prompt for each in made(ROWS[name], tmp_path)]
    check_bits_of_copies(tmp_path, prompts, size, context, kv)


LONG = 1600
"""Tokens of a sequence with four partitions."""
LONG_ROWS = (
    ("llama", 4, 2, False),
    ("deepseek v3", 2, 2, False),
    ("gpt-oss", 4, 2, True),
    ("gemma2", 4, 2, False),
)
"""KV heads of several ranks; latents; sinks, windows and experts; caps of scores."""


LONG_SCHEDULES: dict[str, dict[str, int]] = {
    "together": {},
    "two at a time": {"max_num_seqs": 2},
    "chunks, prefix hits": {"max_num_batched_tokens": 129, "long_prefill_token_threshold": 67},
}


def write_long(name: str, folder: Path) -> list[list[int]]:
    """Write a row's checkpoint for long sequences; return prompts with new tokens that see one to four partitions."""
    write_checkpoint(ROWS[name], folder)
    hf_config = folder / "config.json"
    hf_config.write_text(json.dumps(json.loads(hf_config.read_text()) | {"max_position_embeddings": LONG}))
    rng = random.Random(len(name))
    return [[rng.randrange(3, 200) for _ in range(length)] for length in (20, 600, 1020, 1100, 1534)]


def pieces_of(loaded: Loaded, starts: list[int]) -> set[int]:
    """Return the number of partitions that a rank computes in a step of these new tokens, by layer."""
    runner = loaded.worker.runner
    assert isinstance(runner, ProgramRunner)
    balance = balance_of(runner, starts, [1] * len(starts), 1)
    of_layers = [
        [each.pieces for each in its]
        for name, its in groupby(balance, lambda op: op.name)
        if name == "attention"
    ]
    return {its[-3] for its in of_layers}  # partitions, an exchange, merges


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("name", "size", "context", "experts"), LONG_ROWS)
def test_partitions_are_merged_to_the_bits_of_copies(
    name: str, size: int, context: int, experts: bool, tmp_path: Path
) -> None:
    """Compare new tokens of long sequences with those of ranks with copies: alone, with too few keys, and together."""
    prompts = write_long(name, tmp_path)
    with in_ranks(tmp_path, size, experts=experts, max_model_len=LONG) as loaded:
        expected = alone(loaded, prompts)
    with in_ranks(tmp_path, size, experts=experts, context=context, max_model_len=LONG) as loaded:
        assert pieces_of(loaded, [20]) == {0}
        assert max(pieces_of(loaded, [20, 600, 1020, 1100, 1534])) == 5, (
            "2 + 2 + 3 + 3 partitions by two ranks"
        )
        apart, together = (
            alone(loaded, prompts),
            run(loaded, changed(loaded.config), prompts, watched=True),
        )
    for outcome in (apart, together):
        differing = [key for key, bits in outcome.bits.items() if expected.bits[key] != bits]
        assert not differing, (len(differing), differing[:3])


MANY_HEADS = ((5, 13, False), pytest.param(8, 16, True, marks=pytest.mark.whole))
"""Ranks, heads of each, and whether the layout is one process's. Together they exceed the 64 rows computed at once for a
key, so they form two units. The border of the units lies within the heads of one of five ranks.
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.whole)])
@pytest.mark.parametrize(("size", "heads", "invariant"), MANY_HEADS)
def test_heads_of_several_units_have_the_bits_of_copies(
    size: int, heads: int, invariant: bool, dtype: Dtype, tmp_path: Path
) -> None:
    """Of ranks with copies, and of one process, in any batch."""
    settings = latent.SMALL | {"num_attention_heads": size * heads, "num_key_value_heads": size * heads}
    row = of_transformers(
        "YoutuConfig", **settings, intermediate_size=160, max_position_embeddings=LONG, num_hidden_layers=2
    )
    write_checkpoint(row, tmp_path)
    rng = random.Random(size)
    lengths = (20, 505, 600, 1020, 1040, 1060, 1080, 1100, 1120)
    prompts = [[rng.randrange(3, 200) for _ in range(length)] for length in lengths]
    partitions_together = sum(length // 512 + 1 for length in lengths if length > 512)
    assert partitions_together >= 2 * size, "too few for eight ranks to divide them"
    if invariant:
        loaded = load(tmp_path, dtype, max_model_len=LONG, layout_invariant=True)
        expected = alone(loaded, prompts).bits
    else:
        with in_ranks(tmp_path, size, dtype, max_model_len=LONG) as loaded:
            expected = alone(loaded, prompts).bits
    apart = {"invariant": invariant, "context": size, "max_model_len": LONG}
    with in_ranks(tmp_path, size, dtype, **apart) as loaded:
        assert pieces_of(loaded, [20]) == {0}
        partitions = 3 * 15
        assert max(pieces_of(loaded, [1100] * 15)) == -(-partitions // size) * 2, "two units of each"
        found = {"alone": alone(loaded, prompts).bits}
        for schedule, settings in LONG_SCHEDULES.items():
            rounds = 2 if "hits" in schedule else 1
            found[schedule] = run(
                loaded, changed(loaded.config, **settings), prompts, rounds, watched=True
            ).bits
    for schedule, bits in found.items():
        differing = [key for key, its in bits.items() if expected[key] != its]
        assert bits and not differing, (schedule, len(differing), differing[:3])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_swap_their_own_blocks(stages: int, tmp_path: Path) -> None:
    """KV memory is too small for all; swapped blocks return to other blocks, which other ranks may write."""
    expected = made(ROWS["deepseek v3"], tmp_path)
    with in_ranks(tmp_path, 2, swap_space=2**-10, stages=stages, context=2) as loaded:
        driver = CoreAndWorker(with_blocks(changed(loaded.config), few_blocks(loaded.config)), loaded.worker)
        for i, each in enumerate(expected):
            driver.admit(i + 1, each.prompt, GREEDY)
        driver.run()
    assert [driver.outputs[i + 1] for i in range(len(expected))] == [each.outputs for each in expected]
    assert driver.engine.state is not None and driver.engine.state.counters.swap_in_blocks > 0


def test_choices_copy_blocks_of_other_ranks(tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS["deepseek v3"], tmp_path)]
    params = SamplingParams(n=4, temperature=0.9, top_p=0.95, max_tokens=24, seed=7)
    outputs = []
    for context in (1, 2):
        with in_ranks(tmp_path, 2, context=context) as loaded:
            driver = CoreAndWorker(changed(loaded.config), loaded.worker)
            with mock.patch.object(
                Ranks, "move_blocks", autospec=True, side_effect=Ranks.move_blocks
            ) as moved:
                for i, prompt in enumerate(prompts):
                    driver.admit(10 * i + 10, prompt, params)
                driver.run()
            assert moved.called
            outputs.append(driver.outputs)
    assert outputs[0] == outputs[1]


def test_failed_move_keeps_the_exchanges_in_step(tmp_path: Path) -> None:
    """The step fails, its requests are computed again, and the ranks' exchanges still match."""
    prompt = made(ROWS["deepseek v3"], tmp_path)[1].prompt
    params = SamplingParams(n=2, temperature=0.9, max_tokens=8, seed=7)

    def fail(pairs: bytes) -> None:
        raise MemoryError("a copy of blocks")

    def ask() -> dict[int, list[int]]:
        loaded.worker.reset()
        driver = CoreAndWorker(changed(loaded.config), loaded.worker)
        driver.admit(10, prompt, params)
        driver.run()
        return driver.outputs

    with in_ranks(tmp_path, 2, context=2) as loaded:
        expected = ask()
        worker = loaded.worker
        assert isinstance(worker, Worker)
        with mock.patch.dict(worker._moves.own, {OrderKind.COPY_BLOCKS: fail}), pytest.raises(MemoryError):
            ask()
        assert ask() == expected
