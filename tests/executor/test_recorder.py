"""The recorder of a forward pass: what it does not let a model do."""

from __future__ import annotations

import ctypes

import pytest
import torch

from quintet.executor.layers.linear import GatedActivation, Linear, Part
from quintet.executor.models.model import Setting
from quintet.executor.program.library import program_library
from quintet.executor.program.recorder import Extent, KvMemory, Recorder, Value
from quintet.executor.program.step import CStep
from quintet.executor.quant.registry import open_quantization
from quintet.executor.weights.plan import WeightPlan
from quintet.executor.weights.store import reserve

pytestmark = pytest.mark.skipif(program_library() is None, reason="the host kernels are not built")

DTYPE = torch.bfloat16


@pytest.fixture
def recorder() -> Recorder:
    library = program_library()
    assert library is not None
    return Recorder(library, DTYPE, KvMemory((), 16, 0), max_tokens=8, max_outputs=4)


def linear(columns: int, depth: int, activation: GatedActivation = GatedActivation.NONE) -> Linear:
    plan = WeightPlan(DTYPE, torch.device("cpu"))
    setting = Setting(torch.device("cpu"), DTYPE, open_quantization("none"))
    layer = Linear(setting, plan, (Part("layer", columns),), depth, activation=activation)
    plan.reservation = reserve(plan.stores)
    return layer


def first(recorder: Recorder, width: int = 32) -> Value:
    """A value that something made."""
    return recorder.take_outputs(Value(width, Extent.TOKENS, torch.zeros(8, width, dtype=DTYPE)))


def test_a_sum_is_written_over_its_residual(recorder: Recorder) -> None:
    residual = first(recorder)
    gated = recorder.linear(linear(32, 32), residual)
    y = recorder.linear(linear(32, 32), gated, residual)
    recorder.finish()
    assert y.address == residual.address != gated.address


def test_a_residual_that_is_read_later_is_named(recorder: Recorder) -> None:
    residual = first(recorder)
    x = recorder.linear(linear(32, 32), residual)
    recorder.linear(linear(32, 32), x, residual)
    recorder.rms_norm(residual, torch.ones(32, dtype=DTYPE), 1e-6)
    with pytest.raises(
        AssertionError,
        match=r"operation 2, 'linear 32 to 32', is written over what 'take outputs' made, which operation 3, 'rms_norm', reads",
    ):
        recorder.finish()


def test_a_residual_that_is_multiplied_too_is_named(recorder: Recorder) -> None:
    residual = first(recorder)
    recorder.linear(linear(32, 32), residual, residual)
    with pytest.raises(AssertionError, match=r"'take outputs' made, which it multiplies as well"):
        recorder.finish()


def test_a_residual_of_another_width_is_named(recorder: Recorder) -> None:
    narrow, wide = first(recorder, 32), first(recorder, 48)
    recorder.linear(linear(32, 32), narrow, wide)
    with pytest.raises(
        AssertionError, match=r"'take outputs' made: 48 wide, rows OUTPUTS; it makes 32, rows OUTPUTS"
    ):
        recorder.finish()


def test_a_residual_that_is_kept_too_late_is_refused(recorder: Recorder) -> None:
    residual = first(recorder)
    recorder.linear(linear(32, 32), recorder.linear(linear(32, 32), residual), residual)
    with pytest.raises(AssertionError, match="cannot be kept any more"):
        recorder.keep(residual)


def test_a_kept_residual_stays_what_it_is(recorder: Recorder) -> None:
    residual = first(recorder)
    recorder.keep(residual)
    y = recorder.linear(linear(32, 32), recorder.linear(linear(32, 32), residual), residual)
    recorder.rms_norm(residual, torch.ones(32, dtype=DTYPE), 1e-6)
    recorder.finish()
    assert y.address != residual.address


@pytest.mark.parametrize(("width", "apart"), [(2048, 2080), (4096, 4128), (1984, 1984)])
def test_rows_of_whole_pages_are_a_line_apart(recorder: Recorder, width: int, apart: int) -> None:
    """Or their lines would share a cache's sets. What is read after the pass has no gaps, though memory with gaps was free."""
    x = Value(width, Extent.TOKENS, torch.randn(8, width).to(DTYPE))
    weight = torch.ones(width, dtype=DTYPE)
    normed = recorder.rms_norm(x, weight, 1e-6)
    again = recorder.rms_norm(normed, weight, 1e-6)
    last = recorder.rms_norm(again, weight, 1e-6)
    recorder.keep(x)
    recorder.keep(last)
    recorder.finish()
    assert [value.stride for value in (normed, again, last)] == [apart, apart, width]
    recorder._library.run(recorder.handle, ctypes.byref(CStep(8, 1, 0)), 0, 3)
    assert last.tensor is not None and x.tensor is not None
    expected = torch.nn.functional.rms_norm(x.tensor.float(), (width,))
    torch.testing.assert_close(last.tensor.float(), expected, rtol=2.0**-6, atol=2.0**-6)
