"""Output-layer sums of a device are float32 logits; see `tests.models.test_logits_dtype`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.cuda.test_worker import worker_on
from tests.models.equality import load
from tests.models.test_engine import CoreAndWorker, changed
from tests.models.test_logits_dtype import HIDDEN, ONE_TOKEN, VOCAB, head_of, with_head, write

from quintet.executor.backends.cuda.device import Device

PROMPT = [(5 * i + 3) % VOCAB for i in range(17)]
SUMS = HIDDEN * 2.0**-22
"""Error bound as a share of the products' magnitudes; see `tests.cuda.kernels.test_linear`."""


def first_logits(
    device: Device, folder: Path, batch_invariant: bool, captured: bool
) -> tuple[torch.Tensor, int]:
    """Return the logits after the prompt, and the token drawn from them."""
    config = changed(load(folder, "bfloat16").config, max_num_seqs=4, max_num_batched_tokens=32)
    worker = worker_on(device, config, captured=captured, batch_invariant=batch_invariant)
    engine = CoreAndWorker(config, worker)
    engine.admit(0, PROMPT, ONE_TOKEN)
    engine.run()
    logits = worker.logits(np.array([len(PROMPT) - 1]))
    return logits[0].cpu(), engine.outputs[0][0]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("family", ["LlamaConfig", "PhiConfig"])
def test_logits_are_sums_in_float32(
    family: str, batch_invariant: bool, tmp_path: Path, device: Device
) -> None:
    write(tmp_path, family)
    head, bias = head_of(tmp_path, torch.bfloat16)
    found, token = first_logits(device, tmp_path, batch_invariant, captured=False)
    with_head(tmp_path, torch.eye(VOCAB, HIDDEN))
    hidden = first_logits(device, tmp_path, batch_invariant, captured=False)[0][:HIDDEN].double()
    expected = hidden @ head.T + bias
    assert found.dtype is torch.float32
    assert bool(((found - expected).abs() <= SUMS * (hidden.abs() @ head.abs().T + bias.abs())).all())
    assert token == int(expected.argmax())


def test_captured_steps_draw_from_float32_logits(tmp_path: Path, device: Device) -> None:
    """Decode steps with graphs, which write logits to their own memory, give the tokens of eager steps."""
    write(tmp_path)
    config = changed(load(tmp_path, "bfloat16").config, max_num_seqs=4, max_num_batched_tokens=32)
    params = msgspec.structs.replace(ONE_TOKEN, max_tokens=8)
    outputs = []
    for captured in (False, True):
        engine = CoreAndWorker(config, worker_on(device, config, captured=captured))
        engine.admit(0, PROMPT, params)
        engine.run()
        outputs.append(engine.outputs[0])
    assert outputs[0] == outputs[1]


def test_logits_in_the_model_dtype_are_selectable(tmp_path: Path, device: Device) -> None:
    write(tmp_path)
    config = load(tmp_path, "bfloat16", logits_dtype="model").config
    config = changed(config, max_num_seqs=4, max_num_batched_tokens=32)
    worker = worker_on(device, config, captured=False)
    engine = CoreAndWorker(config, worker)
    engine.admit(0, PROMPT, ONE_TOKEN)
    engine.run()
    assert worker.logits(np.array([len(PROMPT) - 1])).dtype is torch.bfloat16
