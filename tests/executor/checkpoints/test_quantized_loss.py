"""The embedded model still knows its language when it is quantized."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
from bench.quantization.loss import END_OF_TEXT
from tokenizers import Tokenizer

from quintet.deploy.embedded import default_model_path
from quintet.deploy.tools.quantize.loss import read
from quintet.deploy.tools.quantize.target import WINDOW
from quintet.executor.backends.cpu.ops.host_linear import linear_library

HELD_OUT = "fnmatch.py"
"""A library file that TRAINING.json lists as kept from the model."""

# A few times what bench.quantization.loss prints over all held-out files: one file of two thousand tokens scatters around that.
# A scale or a zero point read at the wrong place costs more than half a nat.
ALLOWED: Mapping[str, float] = {"int8": 0.005, "w8a8": 0.005, "int4": 0.13}


def loss(prompts: list[list[int]], **options: str) -> float:
    logprobs, _ = read(prompts, {"threads": 1, **options}, progress=False)
    return -sum(logprobs) / len(logprobs)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(Path(default_model_path()) / "tokenizer.json"))
    library = Path(sysconfig.get_paths()["stdlib"])
    ids = tokenizer.encode((library / HELD_OUT).read_text()).ids
    windows = (ids[begin : begin + WINDOW - 1] for begin in range(0, len(ids), WINDOW - 1))
    return [[END_OF_TEXT, *window] for window in windows]


@pytest.fixture(scope="module")
def exact(prompts: list[list[int]]) -> float:
    exact = loss(prompts)
    assert exact < 3.5  # of log(4096) = 8.3
    return exact


@pytest.mark.drawn(1)  # `tests/models` rounds models in every way, and boots no processes for each
@pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")
@pytest.mark.parametrize("quantization", ALLOWED)
def test_quantization_costs_little_loss(prompts: list[list[int]], exact: float, quantization: str) -> None:
    assert abs(loss(prompts, quantization=quantization) - exact) <= ALLOWED[quantization]


@pytest.mark.whole
@pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")
def test_keys_and_values_of_4_bits_stay_within_two_hundredths_of_a_nat(
    prompts: list[list[int]], exact: float
) -> None:
    assert abs(loss(prompts, kv_cache_dtype="int4") - exact) <= 0.02
