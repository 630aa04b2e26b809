"""Pointwise kernels against torch, on widths that straddle vectors, in every format and instruction set.

Bounds: an operation that rounds once is within one unit in the last place of the reference in fp32 (half a unit for the
rounding, half because fp32 noise may turn a near tie). A second rounding of a factor adds one more.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.executor.kernels.instruction_sets import REPEATING, isa
from tests.executor.kernels.operations import pointwise
from tests.executor.kernels.operations.pointwise import pointwise_functions

from quintet.executor.backends.cpu.ops.activation import ACTIVATION_CODES, activate, xielu
from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.program.step import CStep
from quintet.executor.model_config.spec import Activation

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
"""At most one unit in the last place, relative; for unrounded fp32, the error of sums and exponentials."""
TINY = {torch.bfloat16: 1e-38, torch.float16: 2.0**-24, torch.float32: 1e-37}
"""Below this the formats lose bits: denormals (which AVX512_BF16 makes zero)."""

WIDTHS = [1, 15, 16, 17, 63, 64, 100, 131]
ROWS = 7

dtypes = pytest.mark.parametrize("dtype", DTYPES)
widths = pytest.mark.parametrize("width", WIDTHS)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this number of threads."""
    library = open_library()
    assert library is not None
    library.qt_set_threads(request.param, 0)
    yield request.param
    library.qt_set_threads(1, 0)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check(out: torch.Tensor, expected: torch.Tensor, roundings: int = 1, atol: float = 0.0) -> None:
    dtype = out.dtype
    torch.testing.assert_close(
        out.double(), expected.double(), rtol=roundings * UNIT[dtype], atol=TINY[dtype] + atol
    )


def test_the_requested_instruction_set_is_used() -> None:
    assert isa() == os.environ.get(REPEATING, isa())


@dtypes
@widths
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = noise(ROWS, width, dtype=dtype, scale=3), noise(width, dtype=dtype, seed=1)
    wide = x.float()
    quotient = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    check(pointwise.rms_norm(x, weight, 1e-6), quotient.to(dtype) * weight, roundings=2)
    check(pointwise.rms_norm(x, weight, 1e-6, 1.0), (quotient * (1.0 + weight.float())).to(dtype))
    check(pointwise.rms_norm(x, weight, 1e-6, rounds_once=True), (quotient * weight.float()).to(dtype))
    check(pointwise.rms_norm(x, None, 1e-6), quotient.to(dtype))


@dtypes
@widths
def test_layer_norm(dtype: torch.dtype, width: int) -> None:
    """Against fp64: torch's own layer norm takes the mean's rounding error for a deviation of short rows.

    A result near zero is a difference of terms up to 10; their fp32 noise remains as an absolute error.
    """
    x = noise(ROWS, width, dtype=dtype, scale=3) + 2
    weight, bias = noise(width, dtype=dtype, seed=1), noise(width, dtype=dtype, seed=2)
    atol = 20 * 2.0**-20
    expected = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
    check(pointwise.layer_norm(x, weight, bias, 1e-5), expected, atol=atol)
    check(pointwise.layer_norm(x, None, None, 1e-5), F.layer_norm(x.double(), (width,), eps=1e-5), atol=atol)


@dtypes
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_groups_are_normalised_like_rows(dtype: torch.dtype, offset: float) -> None:
    x, weight = noise(ROWS, 3 * 17, dtype=dtype), noise(3 * 17, dtype=dtype, seed=1)
    apart = x.view(ROWS, 3, 17)
    for group, part in enumerate(weight.view(3, 17)):
        rms = pointwise.rms_norm(apart[:, group], part, 1e-6, offset)
        layer = pointwise.layer_norm(apart[:, group], part, part, 1e-6)
        for weights, where in ((weight, group), (part, group)):
            of_groups = pointwise.rms_norm(x, weights, 1e-6, offset, groups=3).view(ROWS, 3, 17)
            assert torch.equal(of_groups[:, where], rms)
            of_groups = pointwise.layer_norm(x, weights, weights, 1e-6, groups=3).view(ROWS, 3, 17)
            assert torch.equal(of_groups[:, where], layer)


@dtypes
@widths
def test_sums_and_products_are_exact(dtype: torch.dtype, width: int) -> None:
    """One correctly rounded operation: the bits are torch's."""
    x, second = noise(ROWS, width, dtype=dtype), noise(ROWS, width, dtype=dtype, seed=1)
    assert torch.equal(pointwise.add(x, second), x + second)
    assert torch.equal(pointwise.multiply(x, second), x * second)
    assert torch.equal(pointwise.multiply(x, second[:, :1]), x * second[:, :1])
    x[0, 0] = torch.nan
    assert torch.equal(pointwise.clip(x, 0.7).nan_to_num(9), x.clamp(-0.7, 0.7).nan_to_num(9))
    x[0, 0] = 0
    factor = 29.93  # no format represents it exactly
    assert torch.equal(pointwise.scale(x, factor), (x.float() * factor).to(dtype))


@dtypes
def test_softcap(dtype: torch.dtype) -> None:
    """Small and large arguments; two intermediate roundings, each magnified by less than 1."""
    x = noise(ROWS, 131, dtype=dtype) * torch.logspace(-3, 2.5, ROWS).to(dtype)[:, None]
    expected = torch.tanh(x / 30.0) * 30.0
    check(pointwise.softcap(x, 30.0), expected, roundings=2)


@dtypes
def test_xielu(dtype: torch.dtype) -> None:
    """Near 0, where an exponential minus one would cancel, and far below; fp32 noise remains where the curve crosses 0."""
    x = noise(ROWS, 131, dtype=dtype) * torch.logspace(-5, 1.5, ROWS).to(dtype)[:, None]
    x[0, :6] = torch.tensor([0.0, -0.0, 80.0, -80.0, -1.0, -1e-7])
    numbers = torch.tensor([0.8, 0.3, 0.5, -1e-6])
    expected = xielu(x.double(), numbers.double())
    error = (pointwise.xielu(x, numbers).double() - expected).abs()
    assert (error <= UNIT[dtype] * expected.abs() + 2.0**-21 * x.double().abs() + TINY[dtype]).all()


@dtypes
@pytest.mark.parametrize("kind", Activation)
def test_activations(dtype: torch.dtype, kind: Activation) -> None:
    """Near x's negative tail, the factor from 1 plus a term is accurate to 2e-7 only."""
    x = noise(ROWS, 131, dtype=dtype, scale=4)
    x[0, :6] = torch.tensor([0.0, -0.0, 80.0, -80.0, 1e-3, -1e-3])
    expected = activate(x.double(), kind)
    atol = float(4e-7 * x.double().abs().clamp(max=20).max())
    check(pointwise.activation(kind, x), expected, atol=atol)


@dtypes
@widths
@pytest.mark.parametrize("kind", Activation)
def test_gates(dtype: torch.dtype, width: int, kind: Activation) -> None:
    x = noise(ROWS, 2 * width, dtype=dtype, scale=4)
    gate, up = x.chunk(2, dim=-1)
    expected = activate(gate.float(), kind).to(dtype) * up
    check(pointwise.activation_and_mul(kind, x), expected, roundings=2, atol=1e-4)


@dtypes
@pytest.mark.parametrize("kind", Activation)
def test_nan_is_kept(dtype: torch.dtype, kind: Activation) -> None:
    x = torch.full((2, 18), torch.nan, dtype=dtype)
    assert pointwise.activation(kind, x).isnan().all()
    assert pointwise.rms_norm(x, None, 1e-6).isnan().all()


@dtypes
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 64])
def test_gathers(dtype: torch.dtype, table_dtype: torch.dtype, width: int) -> None:
    table = noise(50, width, dtype=table_dtype)
    ids = torch.tensor([3, 49, 0, 3, 7], dtype=torch.int32)
    assert torch.equal(pointwise.embedding(ids, table, dtype), table[ids.long()].to(dtype))
    assert torch.equal(
        pointwise.take_rows(table[:, : width // 2], ids.long()), table[ids.long(), : width // 2]
    )
    columns = torch.randperm(width, generator=torch.Generator().manual_seed(2))
    assert torch.equal(pointwise.take_columns(table, columns.int()), table[:, columns])
    x, positions = noise(5, width, dtype=table_dtype, seed=1), torch.arange(5) * 3
    assert torch.equal(pointwise.add_positions(x, table, positions, 2), x + table[positions + 2])


@dtypes
def test_a_row_has_the_same_bits_in_every_batch_and_at_every_stride(dtype: torch.dtype) -> None:
    x, weight = noise(300, 1000, dtype=dtype), noise(500, dtype=dtype, seed=1)
    whole = pointwise.rms_norm(x[:, 100:600], weight, 1e-6)
    gates = pointwise.activation_and_mul(Activation.SILU, x)
    for begin, end in ((0, 1), (7, 12), (0, 299)):
        assert torch.equal(
            pointwise.rms_norm(x[begin:end, 100:600].contiguous(), weight, 1e-6), whole[begin:end]
        )
        assert torch.equal(pointwise.activation_and_mul(Activation.SILU, x[begin:end]), gates[begin:end])


def test_other_shapes_are_rejected() -> None:
    x = noise(4, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16\[8\]; expected torch.float32\[8\]"):
        pointwise.rms_norm(x, noise(8, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="contiguous rows"):
        pointwise.scale(x.t(), 2.0)
    with pytest.raises(ValueError, match=r"2 \* width"):
        pointwise.activation_and_mul(Activation.SILU, x[:, :7])


def test_a_program_has_the_bits_of_its_operations() -> None:
    """Embedding, positions, scale, norm, gate, residual, activation; then the requested rows, normalised and capped."""
    library, functions = open_library(), pointwise_functions()
    assert library is not None
    assert functions is not None
    for name in ("qt_program_new", "qt_program_delete", "qt_program_run"):
        getattr(library, name).restype = ctypes.c_void_p
    dtype, width, most = torch.bfloat16, 40, 9
    table, places = noise(30, width, dtype=dtype), noise(20, width, dtype=dtype, seed=1)
    weight, bias = noise(width, dtype=dtype, seed=2), noise(width, dtype=dtype, seed=3)
    x, normed, out = (torch.full((most, width), torch.nan, dtype=dtype) for _ in range(3))
    gated = torch.full((most, width // 2), torch.nan, dtype=dtype)
    at = {
        name: (tensor.data_ptr(), tensor.stride(0)) for name, tensor in (("x", x), ("n", normed), ("o", out))
    }
    half = (gated.data_ptr(), gated.stride(0))
    program = ctypes.c_void_p(library.qt_program_new())
    record = functions.program
    record["embedding"](program, table.data_ptr(), width, *at["x"], 0, 0)
    record["add_positions"](program, *at["x"], places.data_ptr(), 2, width, *at["x"], 0)
    record["scale"](program, *at["x"], width, 3.0, *at["x"], 0, 0)
    parameters = (weight.data_ptr(), bias.data_ptr(), False, 1e-5)
    record["layer_norm"](program, *at["x"], 1, width, *parameters, *at["n"], 0, 0)
    record["activation_and_mul"](
        program, ACTIVATION_CODES[Activation.SILU], *at["n"], width // 2, *half, 0, 0
    )
    record["add"](program, *at["x"], *half, width // 2, *at["x"], 0, 0)
    record["activation"](program, ACTIVATION_CODES[Activation.GELU], *at["x"], width, *at["x"], 0, 0)
    record["take_outputs"](program, *at["x"], width, *at["o"], 0)
    record["rms_norm"](program, *at["o"], 1, width, weight.data_ptr(), False, 1e-6, 0.0, 0, *at["o"], 0, 1)
    record["softcap"](program, *at["o"], width, 5.0, *at["o"], 0, 1)

    ids, positions = np.array([3, 29, 7, 3, 0], np.int32), np.array([4, 5, 6, 0, 17])
    outputs = np.array([2, 4])
    step = CStep(num_tokens=5, num_outputs=2)
    step.token_ids, step.positions, step.output_tokens = (
        array.ctypes.data for array in (ids, positions, outputs)
    )
    assert library.qt_program_size(program) == 10
    library.qt_program_run(program, ctypes.byref(step), ctypes.c_int64(0), ctypes.c_int64(10))
    library.qt_program_delete(program)

    expected = pointwise.embedding(torch.from_numpy(ids), table, dtype)
    expected = pointwise.add_positions(expected, places, torch.from_numpy(positions), 2)
    expected = pointwise.scale(expected, 3.0)
    gate = pointwise.activation_and_mul(Activation.SILU, pointwise.layer_norm(expected, weight, bias, 1e-5))
    expected[:, : width // 2] = pointwise.add(expected[:, : width // 2], gate)
    expected = pointwise.activation(Activation.GELU, expected)[torch.from_numpy(outputs)]
    expected = pointwise.softcap(pointwise.rms_norm(expected, weight, 1e-6), 5.0)
    assert torch.equal(out[:2], expected)
    assert out[2:].isnan().all(), "rows that were not requested were written"
    assert x[5:].isnan().all()
