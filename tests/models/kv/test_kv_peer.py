"""Two real cores over two real workers: one fetches the prefix KV of the other, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from tests.models.conftest import in_groups
from tests.models.equality import load
from tests.models.kv.test_groups import WINDOWED
from tests.models.kv.test_kv_disk import PROMPT, whole_blocks
from tests.models.small_models import FAMILIES
from tests.models.test_engine import GREEDY, CoreAndWorker, changed
from tests.models.test_hybrids import of_tests
from tests.processes.test_disaggregation import free_port

from quintet.core import recurrent_state
from quintet.deploy import embedded
from quintet.executor.backends.registry import make_worker
from quintet.wire.config import EngineConfig, KvPeersConfig
from quintet.wire.request import KvTransfer


def with_peers(config: EngineConfig, folder: Path) -> EngineConfig:
    """Return the configuration with peers. Their key is in ``folder``."""
    size = 64 * config.model.kv.bytes_per_block
    key = folder / "kv-peer.key"
    key.write_bytes(b"k" * 32)
    peers = KvPeersConfig(
        role="both",
        listen=f"127.0.0.1:{free_port()}",
        key_file=str(key),
        offered_bytes=size,
        staging_bytes=size,
    )
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, peers=peers))


def answers(config: EngineConfig, folder: Path) -> tuple[list[int], list[int], int]:
    """Return the tokens of a server that computes the prompt, those of one that fetches its KV, and the fetched count."""
    with ExitStack() as closed:
        houses = []
        for one in (with_peers(config, folder), with_peers(config, folder)):
            worker = make_worker(one)
            assert one.cache.peers is not None
            assert worker.kv is not None and worker.kv.back_ends
            closed.callback(worker.kv.close)
            houses.append((CoreAndWorker(one, worker), one.cache.peers.listen))
        (gives, address), (takes, _) = houses
        gives.admit(1, PROMPT, GREEDY, kv_transfer=KvTransfer(offers=True))
        gives.run()
        gives.run_disk_operations()
        takes.admit(1, PROMPT, GREEDY, kv_transfer=KvTransfer(peer=address, num_blocks=1 << 20))
        takes.run()
        return gives.outputs[1], takes.outputs[1], takes.cached[1]


def test_prefix_of_another_worker_is_fetched(serve: Callable[..., Any], tmp_path: Path) -> None:
    config = changed(serve(FAMILIES["llama-gqa-biases"](), max_model_len=160).config)
    computed, fetched, num_cached = answers(config, tmp_path)
    assert fetched == computed and num_cached == whole_blocks(config)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8"])
def test_quantized_kv_is_fetched(kv_dtype: str, tmp_path: Path) -> None:
    config = changed(load(Path(embedded.__file__).parent / "default", kv_cache_dtype=kv_dtype).config)
    computed, fetched, num_cached = answers(config, tmp_path)
    assert fetched == computed and num_cached == whole_blocks(config)


@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_window_layers_are_fetched(family: str, serve: Callable[..., Any], tmp_path: Path) -> None:
    config = changed(in_groups(serve(FAMILIES[family](), max_model_len=160).config))
    computed, fetched, num_cached = answers(config, tmp_path)
    assert fetched == computed and num_cached == whole_blocks(config)


def test_states_are_fetched(tmp_path: Path) -> None:
    with of_tests(tmp_path), mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        config = changed(load(tmp_path, compiled=True, load_format="dummy").config)
        computed, fetched, num_cached = answers(config, tmp_path)
        assert fetched == computed and num_cached
