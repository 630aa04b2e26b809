"""Every operation of a forward pass gives the same tokens by torch and by a recorded program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.conftest import SmallCore, engine_config
from tests.models.odd_models import HF_CONFIG, KINDS, LAYERS, OddModel

from quintet.executor import loading
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.registry import make_worker
from quintet.executor.backends.torch.eager import EagerRunner
from quintet.executor.checkpoints.quant.registry import open_quantization
from quintet.executor.models.model import Setting
from quintet.executor.worker import Worker

PROMPTS = [[(7 * i + n) % 97 for i in range(n)] for n in (1, 6, 23)]

WRITE = "linear 64 to 128, rotate and write KV, attention, linear 64 to 64"
OPERATIONS = {
    "parallel": f"layer_norm, {WRITE}, linear 64 to 96, linear 96 to 64",
    "sandwich": f"rms_norm, {WRITE}, rms_norm, add, rms_norm, linear 64 to 96,"
    " linear 96 to 64, rms_norm, add",
}
"""Of a layer with all possible fusions."""


def worker_of(kind: str, folder: Path, block_size: int, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Return a worker on the CPU; torch computes blocks of 4."""
    setting = Setting(torch.device("cpu"), torch.float32, open_quantization("none"))
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: OddModel(kind, setting))
    worker = make_worker(engine_config(folder, HF_CONFIG, block_size, 128))
    assert isinstance(worker, Worker)
    return worker


def tokens_of(worker: Worker, block_size: int, chunk: int) -> list[list[int]]:
    """Return the continuation of each prompt, all in one batch."""
    worker.reset()
    core = SmallCore(worker, block_size)
    requests = [core.add(prompt, max_tokens=24) for prompt in PROMPTS]
    core.run(chunk=chunk)
    return [request.outputs for request in requests]


def by_torch(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the tokens that torch computes."""
    worker = worker_of(kind, folder, 4, monkeypatch)
    assert isinstance(worker.runner, EagerRunner)
    return tokens_of(worker, 4, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_in_both_passes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_torch(kind, tmp_path, monkeypatch)
    assert all(len(set(tokens)) > 3 for tokens in expected), "too few different tokens"
    worker = worker_of(kind, tmp_path, 16, monkeypatch)
    assert isinstance(worker.runner, ProgramRunner)
    for chunk in (100, 5):
        assert tokens_of(worker, 16, chunk) == expected
    if kind in OPERATIONS:
        layers = OPERATIONS[kind].split(", ") * LAYERS
        last = ["take outputs", "rms_norm", "linear 64 to 97", "scale", "softcap"]
        names = [span.name for span in worker.runner.spans]
        assert names[-len(layers) - len(last) :] == layers + last
