"""Every operation of a forward pass gives the same tokens on a device as computed by torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.conftest import engine_config
from tests.models.odd_models import HF_CONFIG, KINDS, OddModel
from tests.models.test_engine import CoreAndWorker
from tests.models.test_odd_models import PROMPTS, by_torch

from quintet.executor.backends.cuda.boot import make_device_worker
from quintet.executor.backends.cuda.device import Device
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.executor.context import WorkerContext
from quintet.executor.models.model import Setting
from quintet.wire.params import SamplingParams


class RowMajor:
    """Row-major weights as on a GPU, also on an emulated device."""

    linear = RowMajorLinear

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_torch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    config = engine_config(tmp_path, HF_CONFIG, 16, 128)
    setting = Setting(device.torch_device, torch.float32, RowMajor())
    with torch.inference_mode():
        model = OddModel(kind, setting)
    worker = make_device_worker(device, model, WorkerContext(config))
    engine = CoreAndWorker(config, worker)
    for i, prompt in enumerate(PROMPTS):
        engine.admit(i, prompt, SamplingParams(temperature=0.0, max_tokens=8, seed=0))
    engine.run()
    expected = [outputs[:8] for outputs in by_torch(kind, tmp_path, monkeypatch)]
    assert [engine.outputs[i] for i in range(len(PROMPTS))] == expected
