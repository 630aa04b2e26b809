"""The runner of a recorded program: its state after an interrupted call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.models.small_models import FAMILIES

from quintet.executor.backends.cpu.program.runner import ProgramRunner


@pytest.mark.parametrize("serve", [16], ids=["compiled"], indirect=True)
def test_layer_is_eight_operations(serve: Callable[..., Any]) -> None:
    """The linear layers fuse residual sums; the rotation fuses the norms of heads."""
    runner = serve(FAMILIES["qwen3"](), max_model_len=96).core.worker.runner
    assert isinstance(runner, ProgramRunner)
    layer = ["rms_norm", "linear 64 to 256", "rotate and write KV", "attention", "linear 128 to 64"]
    layer += ["rms_norm", "linear 64 to 112", "linear 112 to 64"]
    last = ["take outputs", "rms_norm", "linear 64 to 211"]
    assert [span.name for span in runner.spans] == ["embedding", *layer, *layer, *layer, *last]


@pytest.mark.parametrize("serve", [16], ids=["compiled"], indirect=True)
def test_step_arrays_outlive_an_interrupted_call(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    core, prompt = served.core, [5, 6, 7]
    expected = served.greedy([prompt], 8)[0]
    before = core.add(prompt, max_tokens=8)
    core.run()
    runner = served.core.worker.runner
    assert isinstance(runner, ProgramRunner)
    step = runner.step
    own = step.columns["output_tokens"].ctypes.data

    def interrupted(begin: int, end: int) -> float:
        assert step.c.output_tokens != own
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runner, "run", interrupted)
        runner.logits(np.zeros(3, np.int64))
    assert step.c.output_tokens == own
    after = core.add(prompt, max_tokens=8)
    core.run()
    assert before.outputs == after.outputs == expected
