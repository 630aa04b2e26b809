"""The loss of the embedded model stays small after quantization."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
from bench.quantization.loss import END_OF_TEXT
from tokenizers import Tokenizer

from quintet.deploy.embedded import default_model_path
from quintet.deploy.tools.quantize.loss import read
from quintet.deploy.tools.quantize.windows import WINDOW
from quintet.executor.backends.cpu.ops.host_linear import linear_library

HELD_OUT = "fnmatch.py"
"""A library file that TRAINING.json lists as held out."""

# A few times the result of bench.quantization.loss over all held-out files, as one file of two thousand tokens varies by that.
# A scale or a zero point read from the wrong place costs more than half a nat.
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
def unquantized_loss(prompts: list[list[int]]) -> float:
    unquantized_loss = loss(prompts)
    assert unquantized_loss < 3.5  # log(4096) = 8.3 for a uniform distribution
    return unquantized_loss


@pytest.mark.drawn(1)  # `tests/models` rounds models in every format without starting processes
@pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")
@pytest.mark.parametrize("quantization", ALLOWED)
def test_quantization_costs_little_loss(
    prompts: list[list[int]], unquantized_loss: float, quantization: str
) -> None:
    assert abs(loss(prompts, quantization=quantization) - unquantized_loss) <= ALLOWED[quantization]


@pytest.mark.whole
@pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")
def test_a_4_bit_kv_cache_costs_little_loss(prompts: list[list[int]], unquantized_loss: float) -> None:
    assert abs(loss(prompts, kv_cache_dtype="int4") - unquantized_loss) <= 0.02
