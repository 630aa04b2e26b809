"""Quantization to GGML's types: blocks are readable, and the error is at most that of llama.cpp's quantizer."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quintet.executor.checkpoints.gguf.blocks.encode import WRITERS, encode
from quintet.executor.checkpoints.gguf.types import BY_NAME
from tests.gguf.vocabularies import LLAMA_CPP

ROWS, DEPTH = 64, 1024
LLAMA_CPP_ERRORS = {
    "Q8_0": 0.005366,
    "Q4_0": 0.086186,
    "Q4_1": 0.078159,
    "Q5_0": 0.042758,
    "Q5_1": 0.038016,
    "IQ4_NL": 0.076448,
    "Q2_K": 0.295939,
    "Q3_K": 0.151400,
    "Q4_K": 0.071426,
    "Q5_K": 0.036268,
    "Q6_K": 0.017767,
    "IQ4_XS": 0.076982,
}
"""Root mean square error of llama.cpp's quantizer for `gaussian`: `ggml_quantize_chunk` of llama-cpp-python 0.3.36."""
_LLAMA_CPP_ERRORS = """
import ctypes, json, pathlib, sys
import gguf, llama_cpp, numpy
library = ctypes.CDLL(str(next((pathlib.Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so"))))
quantize = library.ggml_quantize_chunk
quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
numbers = numpy.load(sys.argv[1])
errors = {}
for name in json.loads(sys.argv[2]):
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = numpy.empty((len(numbers), numbers.shape[1] // block * size), numpy.uint8)
    quantize(int(kind), numbers.ctypes.data, out.ctypes.data, 0, *numbers.shape, None)
    errors[name] = float(numpy.sqrt(((gguf.dequantize(out, kind) - numbers) ** 2).mean()))
print(json.dumps(errors))
"""


def gaussian() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal((ROWS, DEPTH)).astype(np.float32)


def read_back(numbers: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Encode, and decode with the `gguf` package."""
    kind = BY_NAME[name]
    out = torch.empty((len(numbers), kind.num_bytes(numbers.shape[1])), dtype=torch.uint8)
    encode(torch.from_numpy(numbers), kind, out)
    found: np.ndarray[Any, Any] = gguf.dequantize(out.numpy(), gguf.GGMLQuantizationType[name])
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_the_error_is_at_most_that_of_llama_cpp(name: str) -> None:
    numbers = gaussian()
    lost = math.sqrt(float(((read_back(numbers, name) - numbers) ** 2).mean()))
    assert 0.85 * LLAMA_CPP_ERRORS[name] < lost < LLAMA_CPP_ERRORS[name]


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed")
def test_recorded_errors_of_llama_cpp_are_current(tmp_path: Path) -> None:
    np.save(tmp_path / "numbers.npy", gaussian())
    arguments = [str(tmp_path / "numbers.npy"), json.dumps(list(LLAMA_CPP_ERRORS))]
    done = subprocess.run(
        [LLAMA_CPP, "-c", _LLAMA_CPP_ERRORS, *arguments], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == pytest.approx(LLAMA_CPP_ERRORS, rel=1e-4)


@pytest.mark.parametrize("name", WRITERS)
def test_extreme_numbers_are_encoded(name: str) -> None:
    """Zeros, one nonzero, all equal, one sign, tiny and huge numbers: results are finite, with the right sign and size."""
    numbers = np.zeros((8, 256), np.float32)
    numbers[1, 7], numbers[2], numbers[3] = -3.0, 0.25, -0.25
    numbers[4], numbers[5] = np.linspace(1, 2, 256), np.linspace(-2, -1, 256)
    numbers[6], numbers[7] = gaussian()[0, :256] * 1e-30, gaussian()[0, :256] * 1e4
    found = read_back(numbers, name)
    assert np.isfinite(found).all()
    assert not found[0].any() and np.abs(found[6]).max() < 1e-6
    assert found[1, 7] == pytest.approx(-3.0, rel=0.02)
    assert np.abs(np.delete(found[1], 7)).max() < 0.03  # 3 / 127 for tables without a zero
    for row in (2, 3, 4, 5):
        assert np.abs(found[row] - numbers[row]).max() < 0.35 * np.abs(numbers[row]).max()
    assert np.corrcoef(found[7], numbers[7])[0, 1] > 0.95


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "F16"])
def test_numbers_out_of_range_are_rejected(name: str) -> None:
    for wrong in (math.inf, math.nan) if name != "F16" else (1e6,):
        numbers = gaussian()[:2]
        numbers[1, 300] = wrong
        with pytest.raises(ValueError, match=r"not finite|beyond the range of F16"):
            read_back(numbers, name)
