"""Prefault of weight memory starts before the size is known; the reservation is used or freed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.frontend.configs import make_config

from quintet.executor import main
from quintet.executor.backends.cpu.ops.huge_memory import CHUNK_BYTES, PAGE_BYTES, HugeMemory
from quintet.executor.backends.registry import BACKENDS, Backend
from quintet.executor.checkpoints.weights.read_ahead import reserve_ahead
from quintet.executor.checkpoints.weights.store import Description, reserve
from quintet.process.spans import no_span
from quintet.wire.config import EngineConfig

EXPECTED = 4 * CHUNK_BYTES


class Layer:
    """A parameter store that records the memory it receives."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.description: Description = {}
        self.memory = torch.empty(0)

    def open(self, memory: torch.Tensor) -> None:
        self.memory = memory


def config_of(folder: Path, **executor: Any) -> EngineConfig:
    config = make_config(str(folder))
    changed = {"kind": "torch", "device": "cpu", "weight_bytes": EXPECTED, **executor}
    return msgspec.structs.replace(config, executor=msgspec.structs.replace(config.executor, **changed))


@pytest.fixture
def ahead(tmp_path: Path) -> HugeMemory:
    memory = reserve_ahead(config_of(tmp_path))
    assert memory is not None
    return memory


@pytest.mark.parametrize("num_bytes", [EXPECTED // 2, EXPECTED, EXPECTED + EXPECTED // 8])
def test_weights_that_fit_use_the_reservation(ahead: HugeMemory, num_bytes: int) -> None:
    layers = [Layer(num_bytes - 4096), Layer(4000)]
    reservation = reserve(layers, ahead)
    assert reservation is not None
    assert ahead.length - PAGE_BYTES < num_bytes <= ahead.length
    begin = ahead.offset + torch.frombuffer(ahead.map, dtype=torch.uint8).data_ptr()
    assert [layer.memory.data_ptr() for layer in layers] == [begin, begin + num_bytes - 4096]
    for layer in layers:
        layer.memory.fill_(1)
        assert int(layer.memory.sum(dtype=torch.int64)) == layer.num_bytes


def test_a_reservation_that_is_too_small_is_freed(ahead: HugeMemory) -> None:
    layer = Layer(2 * EXPECTED)
    assert reserve([layer], ahead) is not None
    assert ahead.map.closed
    assert layer.memory.nbytes == layer.num_bytes and not layer.memory.any()


def test_no_weights_to_pack_frees_the_reservation(ahead: HugeMemory) -> None:
    assert reserve([], ahead) is None
    assert ahead.map.closed


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "cuda"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"packed_cache": "folder"},
        {"weight_bytes": 0},
    ],
    ids=str,
)
def test_no_prefault_if_the_process_does_not_pack_all_weights(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    assert reserve_ahead(config_of(tmp_path, **changed)) is None


def test_no_prefault_for_layers_of_transformers(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = msgspec.structs.replace(config.model, implementation="transformers")
    assert reserve_ahead(msgspec.structs.replace(config, model=model)) is None


@pytest.mark.parametrize(("kind", "load_format"), [("torch", "auto"), ("torch", "dummy"), ("mock", "auto")])
def test_a_worker_that_reads_weights_receives_the_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, load_format: str
) -> None:
    given: list[HugeMemory | None] = []
    backend = Backend(f"{__name__}:worker")
    monkeypatch.setitem(BACKENDS, "mock" if kind == "mock" else "cpu", backend)
    monkeypatch.setattr(sys.modules[__name__], "worker", lambda context: given.append(context.ahead))
    main.make_worker(config_of(tmp_path, kind=kind, load_format=load_format), no_span)
    (memory,) = given
    assert (memory is not None) == (kind == "torch" and load_format == "auto")
    if memory is not None:
        memory.shrink(0)


def worker() -> None:
    """Replace the back end that the configuration names."""
