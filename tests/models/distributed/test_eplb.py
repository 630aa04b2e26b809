"""Expert copies (EPLB) during requests change no bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import SCHEDULES, Dtype, Loaded, Outcome, alone, run, run_schedules
from tests.models.test_engine import changed
from tests.models.test_equal import ROWS, made

from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.wire.config import Quantization

OFTEN = '{{"window_size": 8, "step_interval": 4, "num_redundant_experts": {}}}'


def num_copied(loaded: Loaded) -> int:
    counts = loaded.worker.experts
    assert counts is not None
    return counts.copied()[0]


def outcome_alone(loaded: Loaded, prompts: Sequence[list[int]]) -> Outcome:
    """Compute each prompt alone; keep the logits if the worker's runner exposes them."""
    if not isinstance(loaded.worker, PipelineWorker):
        return alone(loaded, prompts)
    config = changed(loaded.config)
    return Outcome([run(loaded, config, [prompt]).outputs[0] for prompt in prompts], 0, 0, {})


def check(folder: Path, name: str, dtype: Dtype, size: int, quantization: Quantization, stages: int) -> None:
    """Compare the results of the same ranks without expert copies and during copies.

    Also in a batch: then an expert has rows of several requests, and its ranks divide them.
    """
    prompts = [each.prompt for each in made(ROWS[name], folder)]
    with in_ranks(folder, size, dtype, quantization, experts=True, stages=stages) as loaded:
        still = outcome_alone(loaded, prompts)
    config = OFTEN.format(size)
    with in_ranks(folder, size, dtype, quantization, experts=True, stages=stages, eplb=config) as loaded:
        before = num_copied(loaded)
        moving = outcome_alone(loaded, prompts)
        again = outcome_alone(loaded, prompts)
        assert before == 0 < num_copied(loaded), "nothing was copied"
        watched, schedules = bool(still.bits), {"together": SCHEDULES["together"]}
        for schedule, outcome in run_schedules(loaded, prompts, watched, schedules):
            assert outcome.outputs == still.outputs and outcome.bits == still.bits, schedule
    for outcome in (moving, again):
        assert outcome.outputs == still.outputs and outcome.bits == still.bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_expert_copies_change_no_bit(dtype: Dtype, tmp_path: Path) -> None:
    """In fp32 every sum of another order is visible; bf16 has its own kernels for few rows."""
    check(tmp_path, "mixtral", dtype, 2, "none", 1)


@pytest.mark.whole
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "w8a8"])
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 1), (2, 2)], ids=["2", "4", "2x2"])
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "gpt-oss"])
def test_expert_copies_of_other_layouts_change_no_bit(
    name: str, size: int, stages: int, quantization: Quantization, tmp_path: Path
) -> None:
    """Experts with biases too, and two stages that each copy their experts."""
    check(tmp_path, name, "bfloat16", size, quantization, stages)
