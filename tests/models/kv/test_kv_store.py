"""Two real cores over two real workers that share a store: one hits the prefix of the other, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from tests.models.conftest import in_groups
from tests.models.equality import load
from tests.models.kv.test_groups import WINDOWED
from tests.models.kv.test_kv_disk import PROMPT
from tests.models.small_models import FAMILIES
from tests.models.test_engine import GREEDY, CoreAndWorker, changed
from tests.models.test_hybrids import of_tests

from quintet.core import recurrent_state
from quintet.core.kv import chunks
from quintet.deploy import embedded
from quintet.executor.backends.registry import make_worker
from quintet.wire.config import EngineConfig, KvStoreConfig

RUN = 32
"""Tokens, in these tests."""
IN_RUNS = (len(PROMPT) - 1) // RUN * RUN


@pytest.fixture(autouse=True)
def short_runs() -> Iterator[None]:
    with (
        mock.patch.object(chunks, "CHUNK_TOKENS", RUN),
        mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", RUN),
    ):
        yield


def with_store(config: EngineConfig, url: str) -> EngineConfig:
    size = 200 * config.model.kv.bytes_per_block
    store = KvStoreConfig(url=url, size_bytes=10 * size, waiting_bytes=size, staging_bytes=size)
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, store=store))


def answer(config: EngineConfig) -> tuple[list[int], int]:
    """Return the tokens of a new core and worker, and the number of cached prompt tokens; then end them."""
    worker = make_worker(config)
    engine = CoreAndWorker(config, worker)
    engine.admit(1, PROMPT, GREEDY)
    engine.run()
    engine.run_disk_operations()
    assert worker.kv is not None
    worker.kv.close()
    return engine.outputs[1], engine.cached[1]


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_prefix_of_another_worker_is_a_cache_hit(
    scheme: str, serve: Callable[..., Any], tmp_path: Path
) -> None:
    """With our store, and with fsspec."""
    config = changed(serve(FAMILIES["llama-gqa-biases"](), max_model_len=160).config)
    without, _ = answer(config)
    (tmp_path / "kv").mkdir()
    config = with_store(config, f"{scheme}://{tmp_path}/kv")
    assert answer(config) == (without, 0)
    assert answer(config) == (without, IN_RUNS)
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file() and path.name != "ledger":
            content = bytearray(path.read_bytes())
            content[-5] ^= 1
            path.write_bytes(content)
    tokens, num_cached = answer(config)
    assert tokens == without and num_cached < RUN, "only intact blocks are hits"
    assert answer(config) == (without, IN_RUNS), "it was stored again"


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8"])
def test_quantized_kv_is_shared(kv_dtype: str, tmp_path: Path) -> None:
    loaded = load(Path(embedded.__file__).parent / "default", kv_cache_dtype=kv_dtype)
    config = with_store(changed(loaded.config), f"file://{tmp_path}")
    first, num_cached = answer(config)
    assert num_cached == 0
    assert answer(config) == (first, IN_RUNS)


@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_window_layers_are_restored(family: str, serve: Callable[..., Any], tmp_path: Path) -> None:
    config = changed(in_groups(serve(FAMILIES[family](), max_model_len=160).config))
    without, _ = answer(config)
    config = with_store(config, f"file://{tmp_path}/kv")
    assert answer(config) == (without, 0)
    assert answer(config) == (without, IN_RUNS)


def test_states_are_restored(tmp_path: Path) -> None:
    with of_tests(tmp_path):
        config = changed(load(tmp_path, compiled=True, load_format="dummy").config)
        without, _ = answer(config)
        config = with_store(config, f"file://{tmp_path}/kv")
        assert answer(config) == (without, 0)
        assert answer(config) == (without, IN_RUNS)
