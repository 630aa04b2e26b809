"""Whoever has loaded a model in a process that goes on, an engine in Python or a test, has its memory back behind it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import Loaded, alone, load
from tests.models.random_checkpoints import of_transformers, write_checkpoint

from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight

PROMPTS = [[5, 6, 7]]


def num_weights() -> int:
    """Return how many packed weights there are, but for those that the collector of cycles was told to leave alone."""
    gc.collect()
    return sum(isinstance(each, PackedWeight) for each in gc.get_objects())


def load_and_compute(folder: Path, model_impl: str) -> int:
    loaded: Loaded = load(folder, model_impl=model_impl)
    assert alone(loaded, PROMPTS).outputs
    return num_weights()


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_a_model_goes_with_its_worker(model_impl: str, tmp_path: Path) -> None:
    write_checkpoint(of_transformers("LlamaConfig" if model_impl == "auto" else "ApertusConfig"), tmp_path)
    before = num_weights()
    assert load_and_compute(tmp_path, model_impl) > before
    assert num_weights() == before


def test_ranks_that_are_threads_leave_their_memory_to_the_collector(tmp_path: Path) -> None:
    write_checkpoint(of_transformers("LlamaConfig"), tmp_path)
    before = gc.get_freeze_count()
    with in_ranks(tmp_path, 2) as loaded:
        assert alone(loaded, PROMPTS).outputs
    assert gc.get_freeze_count() == before
