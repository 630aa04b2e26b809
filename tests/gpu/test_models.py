"""Row 2 of docs/gpu.md: greedy tokens equal transformers' in fp32, computed on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from tests.models.conftest import serve
from tests.models.test_engine import GREEDY, NUM_TOKENS, House, changed
from tests.models.test_families import FAMILIES, prompts_of

from quintet.executor.worker import make_worker

__all__ = ["serve"]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_equal_transformers(family: str, serve: Callable[..., Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    served = serve(FAMILIES[family](), max_model_len=96)
    prompts = prompts_of()
    expected = [served.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    config = changed(served.config, max_num_batched_tokens=17)
    config = msgspec.structs.replace(config, executor=msgspec.structs.replace(config.executor, device="cuda"))
    house = House(config, make_worker(config))
    for i, prompt in enumerate(prompts):
        house.admit(i + 1, prompt, GREEDY)
    house.run()
    assert [house.outputs[i + 1] for i in range(len(prompts))] == expected
