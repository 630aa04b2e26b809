"""The real core over the real worker with a disk: stored blocks return with the same bits after a restart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from tests.models.conftest import in_groups
from tests.models.equality import load
from tests.models.kv.test_groups import WINDOWED
from tests.models.small_models import FAMILIES
from tests.models.test_engine import GREEDY, CoreAndWorker, changed
from tests.models.test_hybrids import of_tests

from quintet.core import recurrent_state
from quintet.deploy import embedded
from quintet.executor.backends.cpu import backend as cpu_backend
from quintet.executor.backends.registry import make_worker
from quintet.executor.kv_transfer import kv_identity as identity
from quintet.wire.config import EngineConfig, KvDiskConfig

PROMPT = [(7 * position + position * position) % 90 + 5 for position in range(75)]


def with_disk(config: EngineConfig, folder: Path, num_places: int = 64) -> EngineConfig:
    size = num_places * config.model.kv.bytes_per_block
    disk = KvDiskConfig(folder=str(folder), size_bytes=size, staging_bytes=size)
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, disk=disk))


def whole_blocks(config: EngineConfig) -> int:
    """Return the number of prompt tokens in full blocks."""
    block_size = config.model.kv.block_size
    return (len(PROMPT) - 1) // block_size * block_size


def answer(config: EngineConfig) -> tuple[list[int], int]:
    """Return the tokens of a new core and worker, and the number of cached prompt tokens; then end them."""
    worker = make_worker(config)
    engine = CoreAndWorker(config, worker)
    engine.admit(1, PROMPT, GREEDY)
    engine.run()
    assert worker.kv is not None
    worker.kv.close()
    return engine.outputs[1], engine.cached[1]


@pytest.mark.parametrize("compiled", [True, False])
def test_new_worker_hits_the_stored_prefix(
    compiled: bool, serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(serve(FAMILIES["llama-gqa-biases"](), max_model_len=160).config)
    if not compiled:
        monkeypatch.setattr(cpu_backend, "program_library", lambda: None)
    without, _ = answer(config)
    config = with_disk(config, tmp_path)
    assert answer(config) == (without, 0)
    assert answer(config) == (without, whole_blocks(config))
    blocks = tmp_path / "blocks.kv"
    content = bytearray(blocks.read_bytes())
    content[config.model.kv.bytes_per_block + 5] ^= 1
    blocks.write_bytes(content)
    assert answer(config) == (without, config.model.kv.block_size), "only the intact block is a hit"
    assert answer(config) == (without, whole_blocks(config)), "it was stored again"


def test_blocks_of_another_version_are_ignored(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(serve(FAMILIES["llama-gqa-biases"](), max_model_len=160).config)
    disk, code = tmp_path / "disk", tmp_path / "code"
    disk.mkdir()
    code.mkdir()
    config = with_disk(config, disk)
    monkeypatch.setattr(identity, "EXECUTOR", code)
    (code / "rope.py").write_text("BASE = 10000\n")
    without = answer(config)
    assert answer(config) == (without[0], whole_blocks(config))
    (code / "rope.py").write_text("BASE = 1000\n")
    assert answer(config) == without == (without[0], 0)


def test_replaced_weights_invalidate_the_blocks(serve: Callable[..., Any], tmp_path: Path) -> None:
    """With the same name, size and time."""
    config = serve(FAMILIES["llama-gqa-biases"](), max_model_len=160).config
    before = identity.identity_of(config, "runner")
    weights = next(Path(config.model.path).glob("*.safetensors"))
    status, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-100] + bytes(100))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity.identity_of(config, "runner") != before
    weights.write_bytes(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity.identity_of(config, "runner") == before


def test_activation_dtype_invalidates_the_blocks(serve: Callable[..., Any]) -> None:
    config = serve(FAMILIES["llama-gqa-biases"](), max_model_len=160).config
    rounded = msgspec.structs.replace(config.executor, activation_dtype="int8")
    other = msgspec.structs.replace(config, executor=rounded)
    assert identity.identity_of(other, "runner") != identity.identity_of(config, "runner")


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8"])
def test_quantized_kv_is_restored(kv_dtype: str, tmp_path: Path) -> None:
    loaded = load(Path(embedded.__file__).parent / "default", kv_cache_dtype=kv_dtype)
    config = with_disk(changed(loaded.config), tmp_path)
    first, num_cached = answer(config)
    assert num_cached == 0
    assert answer(config) == (first, whole_blocks(config))


@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_window_layers_are_restored(family: str, serve: Callable[..., Any], tmp_path: Path) -> None:
    config = changed(in_groups(serve(FAMILIES[family](), max_model_len=160).config))
    without, _ = answer(config)
    config = with_disk(config, tmp_path, 200)
    assert answer(config) == (without, 0)
    assert answer(config) == (without, whole_blocks(config))


def test_states_are_restored(tmp_path: Path) -> None:
    """State checkpoints after full blocks, in the tests every 32 tokens."""
    with of_tests(tmp_path), mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        loaded = load(tmp_path, compiled=True, load_format="dummy")
        config = changed(loaded.config)
        without, _ = answer(config)
        config = with_disk(config, tmp_path / "kv", 200)
        assert answer(config) == (without, 0)
        tokens, num_cached = answer(config)
        assert tokens == without and num_cached and num_cached % 32 == 0
