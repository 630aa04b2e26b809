"""A process that loads a model and continues, an engine in Python or a test, gets the memory back."""

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
    """Return the number of packed weights, without those frozen for the garbage collector."""
    gc.collect()
    return sum(isinstance(each, PackedWeight) for each in gc.get_objects())


def load_and_compute(folder: Path, model_impl: str) -> int:
    loaded: Loaded = load(folder, model_impl=model_impl)
    assert alone(loaded, PROMPTS).outputs
    return num_weights()


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_model_is_freed_with_its_worker(model_impl: str, tmp_path: Path) -> None:
    write_checkpoint(of_transformers("LlamaConfig" if model_impl == "auto" else "ApertusConfig"), tmp_path)
    before = num_weights()
    assert load_and_compute(tmp_path, model_impl) > before
    assert num_weights() == before


def test_memory_of_rank_threads_is_collected(tmp_path: Path) -> None:
    write_checkpoint(of_transformers("LlamaConfig"), tmp_path)
    before = gc.get_freeze_count()
    with in_ranks(tmp_path, 2) as loaded:
        assert alone(loaded, PROMPTS).outputs
    assert gc.get_freeze_count() == before
