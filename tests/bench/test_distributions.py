"""Divergence of a model from itself and from its quantized weights."""

from __future__ import annotations

import pytest
from bench.quantization.distributions import Reference, score

from quintet.deploy.embedded import default_model_path
from quintet.executor.backends.cpu.ops.host_linear import linear_library

WINDOWS = [list(range(begin, begin + 40)) for begin in (300, 700)]


@pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")
def test_quantized_weights_diverge_and_equal_ones_do_not() -> None:
    model, reference = str(default_model_path()), Reference()
    first = score("float32", {"model": model, "dtype": "float32"}, WINDOWS, reference)
    again = score("float32 again", {"model": model, "dtype": "float32"}, WINDOWS, reference)
    rounded = score("int4", {"model": model, "quantization": "int4"}, WINDOWS, reference)
    assert first.num_tokens == sum(len(window) - 1 for window in WINDOWS)
    assert (again.divergence, again.same_choice) == (0, 1) and again.perplexity == first.perplexity
    assert rounded.divergence > 0.001 and rounded.memory_mb < first.memory_mb
    assert [len(logprobs) for logprobs in reference] == [len(window) - 1 for window in WINDOWS]
