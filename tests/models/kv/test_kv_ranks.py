"""Blocks of a divided model on disk and in a store: the parts are joined, and restored with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from tests.models.distributed.ranks import in_ranks
from tests.models.kv.test_kv_disk import PROMPT, with_disk
from tests.models.kv.test_kv_disk import answer as answer_of_one
from tests.models.kv.test_kv_peer import with_peers
from tests.models.kv.test_kv_store import RUN, with_store
from tests.models.test_engine import GREEDY, CoreAndWorker, changed
from tests.models.test_equal import ROWS, made

from quintet.core import recurrent_state
from quintet.core.kv import chunks
from quintet.executor.distributed.parallel import shapes
from quintet.wire.config import EngineConfig
from quintet.wire.request import KvTransfer

Layout = tuple[int, int, int]
"""Ranks of a stage, stages, and ranks that share one KV memory."""
LAYOUTS: list[Layout] = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (4, 1, 2)]
NUM_PLACES = 200


def answer(
    folder: Path, layout: Layout, change: Callable[[EngineConfig], EngineConfig] = lambda config: config
) -> tuple[list[int], int]:
    """Return the tokens of a new core and ranks, and the number of cached prompt tokens; then end them."""
    size, stages, context = layout
    with in_ranks(folder, size, stages=stages, context=context, change=change) as loaded:
        driver = CoreAndWorker(changed(loaded.config), loaded.worker)
        driver.admit(1, PROMPT, GREEDY)
        driver.run()
        driver.run_disk_operations()
        check_bytes(driver, loaded.config)
        assert loaded.worker.kv is not None
        loaded.worker.kv.close()
    return driver.outputs[1], driver.cached[1]


def check_bytes(driver: CoreAndWorker, config: EngineConfig) -> None:
    """Check that the counted bytes are those of whole blocks."""
    assert driver.engine.state is not None
    transfers, block_bytes = driver.engine.state.counters.transfers, whole_bytes(config)
    assert transfers["disk", "stored_bytes"] == transfers["disk", "stored_objects"] * block_bytes
    assert transfers["disk", "fetched_bytes"] == transfers["disk", "fetched_blocks"] * block_bytes


def whole_bytes(config: EngineConfig) -> int:
    """Return the bytes of a block, of all ranks."""
    return config.model.kv.bytes_per_block * config.executor.num_kv_memories


def in_blocks(config: EngineConfig, tokens: int = len(PROMPT) - 1) -> int:
    """Return the number of tokens in full blocks."""
    return tokens // config.model.kv.block_size * config.model.kv.block_size


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_ranks_hit_the_stored_prefix(layout: Layout, tmp_path: Path) -> None:
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS["llama"], model)
    configs: list[EngineConfig] = []

    def kept(config: EngineConfig) -> EngineConfig:
        configs.append(with_disk(config, disk, NUM_PLACES))
        return configs[-1]

    without, _ = answer(model, layout)
    assert answer(model, layout, kept) == (without, 0)
    config = configs[0]
    assert answer(model, layout, kept) == (without, in_blocks(config))
    block_bytes = whole_bytes(config)
    content = bytearray((disk / "blocks.kv").read_bytes())
    content[2 * block_bytes - 5] ^= 1  # of the last part
    (disk / "blocks.kv").write_bytes(content)
    assert answer(model, layout, kept) == (without, config.model.kv.block_size), (
        "only the intact block is a hit"
    )
    assert answer(model, layout, kept) == (without, in_blocks(config)), "it was stored again"


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_with_space_for_one_block(layout: Layout, tmp_path: Path) -> None:
    """With space for one block only, the next one waits until all ranks have copied."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS["llama"], model)
    without, _ = answer(model, layout)
    with mock.patch.object(shapes, "KV_GATHER_BYTES", 1):
        for is_warm in (False, True):
            tokens, num_cached = answer(model, layout, lambda config: with_disk(config, disk, NUM_PLACES))
            assert tokens == without and bool(num_cached) == is_warm


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in ("gemma3", "deepseek v3") for layout in LAYOUTS),
        *((name, layout) for name in ("qwen 3.5", "falcon h1") for layout in LAYOUTS if layout[2] == 1),
    ],
)
def test_windows_latents_and_states_are_restored(name: str, layout: Layout, tmp_path: Path) -> None:
    """Grouped layers share blocks between stages."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS[name], model)
    with mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        without, _ = answer(model, layout)
        for is_warm in (False, True):
            tokens, num_cached = answer(model, layout, lambda config: with_disk(config, disk, NUM_PLACES))
            assert tokens == without and bool(num_cached) == is_warm


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_a_store(layout: Layout, tmp_path: Path) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    model.mkdir()
    store.mkdir()
    made(ROWS["llama"], model)
    without, _ = answer(model, layout)
    with mock.patch.object(chunks, "CHUNK_TOKENS", RUN):
        for expected in (0, (len(PROMPT) - 1) // RUN * RUN):
            tokens, num_cached = answer(model, layout, lambda config: with_store(config, f"file://{store}"))
            assert (tokens, num_cached) == (without, expected)


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_fetch_offered_blocks(layout: Layout, tmp_path: Path) -> None:
    made(ROWS["llama"], tmp_path)
    (size, stages, context), configs = layout, list[EngineConfig]()

    def offering(config: EngineConfig) -> EngineConfig:
        configs.append(with_peers(config, tmp_path))
        return configs[-1]

    with ExitStack() as closed:
        houses: list[CoreAndWorker] = []
        for _ in range(2):
            loaded = closed.enter_context(
                in_ranks(tmp_path, size, stages=stages, context=context, change=offering)
            )
            assert loaded.worker.kv is not None and loaded.worker.kv.back_ends
            closed.callback(loaded.worker.kv.close)
            houses.append(CoreAndWorker(changed(loaded.config), loaded.worker))
        gives, takes = houses
        gives.admit(1, PROMPT, GREEDY, kv_transfer=KvTransfer(offers=True))
        gives.run()
        gives.run_disk_operations()
        assert configs[0].cache.peers is not None
        peer = configs[0].cache.peers.listen
        takes.admit(1, PROMPT, GREEDY, kv_transfer=KvTransfer(peer=peer, num_blocks=1 << 20))
        takes.run()
    assert takes.outputs == gives.outputs and takes.cached[1] == in_blocks(configs[0])


def test_one_process_reads_the_blocks_of_stages(tmp_path: Path) -> None:
    """For identical layers: stages do not sum, so bits are the same, and blocks have the same layout. Those of ranks differ."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS["llama"], model)
    configs: list[EngineConfig] = []

    def kept(config: EngineConfig) -> EngineConfig:
        configs.append(with_disk(changed(config), disk, NUM_PLACES))
        return configs[-1]

    tokens, _ = answer(model, (1, 2, 1), kept)
    executor = msgspec.structs.replace(configs[0].executor, pipeline_parallel_size=1)
    one_process = msgspec.structs.replace(configs[0], executor=executor)
    assert answer_of_one(one_process) == (tokens, in_blocks(one_process))
    assert answer(model, (2, 1, 1), kept)[1] == 0


def test_blocks_of_other_layouts_are_ignored(tmp_path: Path) -> None:
    """As many ranks sum, and their parts of the same layers form a block, but in another order."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS["llama"], model)

    def kept(config: EngineConfig) -> EngineConfig:
        return with_disk(config, disk, NUM_PLACES)

    tokens, _ = answer(model, (2, 2, 1), kept)
    assert answer(model, (2, 1, 1), kept) == (tokens, 0)
