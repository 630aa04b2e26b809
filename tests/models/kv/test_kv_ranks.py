"""Blocks of a model that is divided, on disk and in a store: parts come together, and come back as the bits that they were."""

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
from tests.models.test_engine import GREEDY, House, changed
from tests.models.test_equal import ROWS, made

from quintet.core import recurrent_state
from quintet.core.kv import store_pool
from quintet.executor.distributed.parallel import shapes
from quintet.wire.config import EngineConfig
from quintet.wire.request import KvTransfer

Layout = tuple[int, int, int]
"""Ranks of a stage, stages, and ranks that keep one KV memory together."""
LAYOUTS: list[Layout] = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (4, 1, 2)]
NUM_PLACES = 200


def answer(
    folder: Path, layout: Layout, change: Callable[[EngineConfig], EngineConfig] = lambda config: config
) -> tuple[list[int], int]:
    """Return what a core and ranks that have just begun answer, and how much of the prompt was cached; then end them."""
    size, stages, context = layout
    with in_ranks(folder, size, stages=stages, context=context, change=change) as loaded:
        house = House(changed(loaded.config), loaded.worker)
        house.admit(1, PROMPT, GREEDY)
        house.run()
        house.order_all()
        check_bytes(house, loaded.config)
        for place in (loaded.worker.kv_disk, loaded.worker.kv_store):
            if place is not None:
                place.close()
    return house.outputs[1], house.cached[1]


def check_bytes(house: House, config: EngineConfig) -> None:
    """What is counted are whole blocks."""
    assert house.engine.state is not None
    counters, block_bytes = house.engine.state.counters, whole_bytes(config)
    assert counters.disk_stored_bytes == counters.disk_stored_blocks * block_bytes
    assert counters.disk_fetched_bytes == counters.disk_fetched_blocks * block_bytes


def whole_bytes(config: EngineConfig) -> int:
    """Return what a block takes, of all ranks."""
    return config.model.kv.bytes_per_block * config.executor.num_kv_memories


def in_blocks(config: EngineConfig, tokens: int = len(PROMPT) - 1) -> int:
    """Return how many of so many tokens lie in full blocks."""
    return tokens // config.model.kv.block_size * config.model.kv.block_size


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_begin_behind_what_the_last_ones_left(layout: Layout, tmp_path: Path) -> None:
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS["llama"], model)
    told: list[EngineConfig] = []

    def kept(config: EngineConfig) -> EngineConfig:
        told.append(with_disk(config, disk, NUM_PLACES))
        return told[-1]

    without, _ = answer(model, layout)
    assert answer(model, layout, kept) == (without, 0)
    config = told[0]
    assert answer(model, layout, kept) == (without, in_blocks(config))
    block_bytes = whole_bytes(config)
    content = bytearray((disk / "blocks.kv").read_bytes())
    content[2 * block_bytes - 5] ^= 1  # of the last part
    (disk / "blocks.kv").write_bytes(content)
    assert answer(model, layout, kept) == (without, config.model.kv.block_size), (
        "behind the block that is whole"
    )
    assert answer(model, layout, kept) == (without, in_blocks(config)), "it was stored anew"


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_at_a_time(layout: Layout, tmp_path: Path) -> None:
    """Where there is room for one alone, the next one waits until all ranks have copied."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS["llama"], model)
    without, _ = answer(model, layout)
    with mock.patch.object(shapes, "CROSSING_BYTES", 1):
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
def test_windows_latents_and_states_come_back(name: str, layout: Layout, tmp_path: Path) -> None:
    """Of layers in groups, whose places several stages have."""
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
    with mock.patch.object(store_pool, "RUN_TOKENS", RUN):
        for expected in (0, (len(PROMPT) - 1) // RUN * RUN):
            tokens, num_cached = answer(model, layout, lambda config: with_store(config, f"file://{store}"))
            assert (tokens, num_cached) == (without, expected)


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_fetch_what_others_offer(layout: Layout, tmp_path: Path) -> None:
    made(ROWS["llama"], tmp_path)
    (size, stages, context), told = layout, list[EngineConfig]()

    def offering(config: EngineConfig) -> EngineConfig:
        told.append(with_peers(config))
        return told[-1]

    with ExitStack() as closed:
        houses: list[House] = []
        for _ in range(2):
            loaded = closed.enter_context(
                in_ranks(tmp_path, size, stages=stages, context=context, change=offering)
            )
            assert loaded.worker.kv_peers is not None
            closed.callback(loaded.worker.kv_peers.close)
            houses.append(House(changed(loaded.config), loaded.worker))
        gives, takes = houses
        gives.admit(1, PROMPT, GREEDY, handover=KvTransfer(offers=True))
        gives.run()
        gives.order_all()
        assert told[0].cache.peers is not None
        peer = told[0].cache.peers.listen
        takes.admit(1, PROMPT, GREEDY, handover=KvTransfer(peer=peer, num_blocks=1 << 20))
        takes.run()
    assert takes.outputs == gives.outputs and takes.cached[1] == in_blocks(told[0])


def test_one_process_reads_what_stages_have_left(tmp_path: Path) -> None:
    """Of layers that are all alike: stages add nothing up, so bits are the same, and blocks lie alike. Ranks have others."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS["llama"], model)
    told: list[EngineConfig] = []

    def kept(config: EngineConfig) -> EngineConfig:
        told.append(with_disk(changed(config), disk, NUM_PLACES))
        return told[-1]

    tokens, _ = answer(model, (1, 2, 1), kept)
    executor = msgspec.structs.replace(told[0].executor, pipeline_parallel_size=1)
    one_process = msgspec.structs.replace(told[0], executor=executor)
    assert answer_of_one(one_process) == (tokens, in_blocks(one_process))
    assert answer(model, (2, 1, 1), kept)[1] == 0


def test_ranks_of_stages_leave_nothing_to_those_of_one_stage(tmp_path: Path) -> None:
    """As many ranks add up, and their parts of the same layers are a block, but in another order."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    made(ROWS["llama"], model)

    def kept(config: EngineConfig) -> EngineConfig:
        return with_disk(config, disk, NUM_PLACES)

    tokens, _ = answer(model, (2, 2, 1), kept)
    assert answer(model, (2, 1, 1), kept) == (tokens, 0)
