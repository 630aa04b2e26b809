"""``--activation-dtype int8``: models with inputs rounded to 8 bits, where their weights are integers."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.quantization import layers
from tests.models.checkpoints.quantized import write
from tests.models.checkpoints.test_formats import EXPERTS, FORMATS, MORE_FORMATS, PROMPTS, SOME_SCHEDULES
from tests.models.equality import alone, load, logits_of, one_torch_thread, run_schedules

from quintet.executor.backends.cpu.ops.host_linear import linear_library
from quintet.wire.errors import ConfigError

pytestmark = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")

INTEGERS = {
    "gptq": (layers.gptq(4, 32, symmetric=False), None),
    "mxfp4": (MORE_FORMATS["compressed-tensors, mxfp4"], None),
    "experts": (layers.awq(32), EXPERTS),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", INTEGERS)
def test_8_bit_inputs_change_logits_slightly_and_bits_never(name: str, tmp_path: Path) -> None:
    ours, plain = write(tmp_path, *INTEGERS[name])
    loaded = load(ours, activation_dtype="int8")
    with one_torch_thread():
        its, expected = alone(loaded, PROMPTS), alone(load(plain), PROMPTS)
        for i, prompt in enumerate(PROMPTS):
            actual, exact = (logits_of(each, i, len(prompt))[0] for each in (its, expected))
            apart = float((actual - exact).square().mean().sqrt() / exact.std())
            # A step of 1 / 127 of the largest of 32 normal numbers, some 2.1 deviations, over the root of 12: half of a
            # hundredth of each input, with random signs, in each of some ten consecutive layers.
            assert 1e-3 < apart < 0.05, (i, apart)
        for schedule, outcome in run_schedules(loaded, PROMPTS, watched=True, schedules=SOME_SCHEDULES):
            assert outcome.bits.items() <= its.bits.items(), schedule


@pytest.mark.parametrize("name", ["fp8", "bitsandbytes", "squeezellm"])
def test_inputs_are_not_rounded_where_weights_are_floats(name: str, tmp_path: Path) -> None:
    ours, _ = write(tmp_path, (FORMATS | MORE_FORMATS)[name])
    with pytest.raises(ConfigError, match="--activation-dtype int8 needs integer weights"):
        load(ours, activation_dtype="int8", load_format="dummy")
