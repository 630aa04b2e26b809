"""One call of each kernel family with its float64 reference, for `bench.gpu.smoke`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tests.cuda.kernels.references import rope_kv_reference

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.activation import Gate, gated
from quintet.executor.backends.cuda.ops.blocks import BlockPool, copy_blocks
from quintet.executor.backends.cuda.ops.draw import draw
from quintet.executor.backends.cuda.ops.entries import entries_on_device
from quintet.executor.backends.cuda.ops.linear import matmul, matvec
from quintet.executor.backends.cuda.ops.linear_coded import coded_matmul
from quintet.executor.backends.cuda.ops.linear_fp8 import fp8_matmul, fp8_quantize, fp8_quantize_reference
from quintet.executor.backends.cuda.ops.linear_groups import head_matmul
from quintet.executor.backends.cuda.ops.norm import add_rms_norm, layer_norm, rms_norm
from quintet.executor.backends.cuda.ops.rope_kv import HeadTransform, rope_kv

BF16 = torch.bfloat16
HALF_ULP = 2.0**-8
"""Half a unit in the last place of bf16, relative."""

Error = tuple[float, float]
"""Largest error relative to float64, and its bound."""


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that are tested together."""

    name: str
    run: Callable[[Device], Error]


def worst(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float) -> Error:
    """Return error and bound of the element with the largest ratio of error to bound."""
    error = (found.double().cpu() - exact.double().cpu()).abs()
    if not bool(error.isfinite().all()):
        return float("inf"), 0.0
    bounds = torch.as_tensor(bound, dtype=torch.float64).cpu().expand_as(error)
    at = int((error / bounds.clamp(min=1e-30)).flatten().nan_to_num(nan=float("inf")).argmax())
    return float(error.flatten()[at]), float(bounds.flatten()[at])


def largest(errors: Sequence[Error]) -> Error:
    """Return the error with the largest ratio to its bound."""
    return max(errors, key=lambda each: each[0] / max(each[1], 1e-30))


def random_bf16(device: Device, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return normally distributed bf16 numbers on the device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(BF16).to(device.torch_device)


def norms(device: Device) -> Error:
    """RMS norm, RMS norm of a sum, layer norm."""
    x, weight = random_bf16(device, 5, 4096), random_bf16(device, 4096)
    wide, factor = x.double().cpu(), weight.double().cpu()

    def rms(rows: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(1, keepdim=True) + 1e-5).rsqrt() * factor

    total, normed = add_rms_norm(device, x, x.clone(), weight, 1e-5)
    exact_layer = F.layer_norm(wide, (4096,), factor, factor, 1e-5)
    found = [
        (
            rms_norm(device, x, weight, 1e-5),
            rms(wide),
            3 * HALF_ULP,
        ),  # rounded after the norm and after the weight
        (normed, rms(total.double().cpu()), 3 * HALF_ULP),
        (layer_norm(device, x, weight, weight, 1e-5), exact_layer, 2 * HALF_ULP),
    ]
    return largest([worst(y, exact, share * exact.abs() + 1e-5) for y, exact, share in found])


def activation(device: Device) -> Error:
    """SiLU of one half times the other."""
    x = random_bf16(device, 5, 2048)
    gates, ups = x.double().cpu().chunk(2, 1)
    exact = F.silu(gates) * ups
    return worst(gated(device, x, Gate.SILU), exact, 3 * HALF_ULP * exact.abs() + 1e-6)


def product_bound(x: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Bound of a product summed by tensor cores and rounded once: see ``tests/cuda/kernels/test_linear.py``."""
    slack = x.shape[1] * 2.0**-22 * (x.abs() @ weight.abs().T)
    return 1.01 * (slack + HALF_ULP * (exact.abs() + slack))


def linear(device: Device) -> Error:
    """Our products of bf16, for one row, few rows and many."""
    weight = random_bf16(device, 320, 1024, scale=1024**-0.5)
    errors = []
    for rows, multiply in ((1, matvec), (1, matmul), (20, matmul), (50, matmul), (200, matmul)):
        x = random_bf16(device, rows, 1024)
        wide = x.double().cpu(), weight.double().cpu()
        exact = wide[0] @ wide[1].T
        errors.append(worst(multiply(device, x, weight), exact, product_bound(*wide, exact)))
    return largest(errors)


def linear_by_head(device: Device) -> Error:
    """Products of rows in groups, as of experts."""
    x, weight = random_bf16(device, 9, 4 * 64), random_bf16(device, 4, 48, 64, scale=0.125)
    wide = x.double().cpu().unflatten(1, (4, 64))
    exact = torch.einsum("nhd,hcd->nhc", wide, weight.double().cpu()).flatten(1)
    return worst(head_matmul(device, x, weight), exact, 2 * HALF_ULP * exact.abs() + 1e-3)


def linear_coded(device: Device) -> Error:
    """Products by int4, int8, fp8 and fp4 codes."""
    from tests.cuda.kernels.test_linear_coded import LAYOUTS, Rows

    errors = []
    for layout, num_rows in itertools.product(LAYOUTS.values(), (1, 40)):
        rows = Rows.draw(layout)
        x = random_bf16(device, num_rows, layout.depth)
        numbers, magnitudes = rows.numbers(layout)
        wide = x.double().cpu()
        exact = wide @ numbers.T
        slack = (layout.depth + 8) * 2.0**-22 * (wide.abs() @ magnitudes.T)
        found = coded_matmul(device, x, rows.on(device, layout))
        errors.append(worst(found, exact, 1.01 * (slack + HALF_ULP * (exact.abs() + slack))))
    return largest(errors)


def linear_fp8(device: Device) -> Error:
    """Products of e4m3 rows and e4m3 weights."""
    weight = random_bf16(device, 96, 512).to(torch.float8_e4m3fn)
    scales = torch.full((96,), 0.01, device=device.torch_device)
    x = random_bf16(device, 40, 512)
    codes, row_scales = fp8_quantize_reference(x.cpu())
    exact = (codes.double() @ weight.cpu().double().T) * (row_scales[:, None].double() * 0.01)
    return worst(fp8_matmul(device, x, weight, scales), exact, 2 * HALF_ULP * exact.abs() + 1e-2)


def attention(device: Device) -> Error:
    """Decode rows and chunks over scattered blocks: tensor cores in bf16, the plain kernel in fp32."""
    from tests.cuda.kernels.attention_problem import Problem, Shape

    errors = []
    for shape in (
        Shape(num_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16),
        Shape(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32),
    ):
        problem = Problem(device, shape, [300, 70, 33])
        for rows in ([(299, 1), (69, 1), (32, 1)], [(100, 200), (0, 70), (32, 1)]):
            step = problem.run(rows)
            errors.append(worst(step.out, *step.expected()))
    return largest(errors)


def rotation(device: Device) -> Error:
    """Rotation of queries and keys, and the write of keys and values into blocks."""
    from tests.cuda.kernels.test_rope_kv import make_inputs

    errors = []
    for turn in (HeadTransform(), HeadTransform(interleaved=True)):  # the second by the plain kernel
        inputs = make_inputs(device, BF16, 128, 128)
        kv = inputs.kv.clone()
        q, k, v = inputs.heads
        expected = rope_kv_reference(q, k, v, inputs.cos, inputs.sin, kv, inputs.rows, turn)
        queries = rope_kv(device, q, k, v, inputs.cos, inputs.sin, inputs.kv, inputs.rows, turn)
        errors += [worst(queries, expected, 1e-12), worst(inputs.kv, kv, 1e-12)]
    return largest(errors)


def states(device: Device) -> Error:
    """Layers with recurrent states, with rows that continue and rows that begin."""
    from tests.cuda.kernels.test_states import FRESH, REFERENCES, UNIT, Blocks
    from tests.executor.kernels.state_problems import SHAPES, rows_of

    errors, counts = [], [9, 1, 2]
    for problem in SHAPES.values():
        blocks = Blocks(device, problem(sum(counts), BF16))
        plain = rows_of(counts, [5, 1, 2], [5, 4, 3], [False, False, True])
        for name in ("sources", "targets", "fresh", "offsets", "counts"):
            object.__setattr__(plain, name, getattr(plain, name).to(device.torch_device))
        kept = blocks.states.clone()
        expected = blocks.problem.run(REFERENCES, plain, kept, slice(sum(counts))).double().cpu()
        found = blocks.step(counts, [(5, 5), (1, 4), (FRESH, 3)])
        bound = UNIT[BF16] * (2 * expected.abs() + float(expected.abs().max()) / 4)
        errors.append(worst(found, expected, bound))
    return largest(errors)


def sampling(device: Device) -> Error:
    """Greedy sampling, and log-probabilities of the most likely tokens."""
    logits = random_bf16(device, 6, 4099, scale=4.0)
    wide = logits.double().cpu()
    positions = torch.arange(6, dtype=torch.int32, device=device.torch_device)
    out = torch.zeros(6, dtype=torch.int32, device=device.torch_device)
    draw(device, logits, settings=None, slots=None, positions=positions, out=out)
    best = wide.max(1, keepdim=True).values
    lowest = (wide == best).to(torch.uint8).argmax(1)
    assert out.cpu().tolist() == lowest.tolist(), "greedy draws are not the lowest of the largest logits"
    found = entries_on_device(device, logits, out, 5)
    exact = torch.log_softmax(wide, 1).sort(1, descending=True).values[:, :5]
    return worst(torch.from_numpy(np.ascontiguousarray(found.values[:, 1:])), exact, 1e-4)


def penalties(device: Device) -> Error:
    """Repetition, presence and frequency penalties of rows with repeated tokens."""
    from tests.cuda.kernels import test_sampling_penalties

    test_sampling_penalties.test_penalties(device)
    return 0.0, 1.0


def scaled_mm(device: Device) -> Error:
    """Fp8 products by ``torch._scaled_mm`` within a captured graph, compared with our kernel."""
    weight = random_bf16(device, 96, 512).to(torch.float8_e4m3fn)
    scales = torch.full((96,), 0.01, device=device.torch_device)
    x, out = random_bf16(device, 48, 512), torch.empty(48, 96, dtype=BF16, device=device.torch_device)

    def product() -> None:
        codes, row_scales = fp8_quantize(device, x)
        y = torch._scaled_mm(
            codes, weight.t(), scale_a=row_scales[:, None], scale_b=scales[None, :], out_dtype=BF16
        )
        out.copy_(y)

    try:
        product()
    except RuntimeError:
        if device.torch_device.type == "cuda":
            raise
        return 0.0, 1.0  # torch 2.11 has no scales by row on a CPU
    device.capture(product)()
    device.synchronize()
    exact = fp8_matmul(device, x, weight, scales).double().cpu()
    return worst(out, exact, 4 * HALF_ULP * exact.abs() + 1e-2)


def blocks(device: Device) -> Error:
    """Copies of KV blocks within the device."""
    memory = [random_bf16(device, 8, 2, 2, 16, 16) for _ in range(2)]
    expected = [place.clone() for place in memory]
    for place in expected:
        place[5], place[7] = place[1], place[2]
    pool = BlockPool.of(device, memory)
    pairs = torch.tensor([[1, 5], [2, 7]], dtype=torch.int32, device=device.torch_device)
    copy_blocks(device, pool, pool, pairs)
    device.synchronize()
    return worst(torch.stack(memory), torch.stack(expected), 1e-12)


def tables(device: Device) -> Error:
    """A plan spread over the slot tables."""
    from bench.gpu.kernel_rows import step_rows

    rows = step_rows(device, 5, 40, 3)
    expected = torch.arange(40, 43).repeat(5)
    return worst(rows.positions[:15].cpu(), expected, 1e-12)


FAMILIES = (
    Family("tables", tables),
    Family("blocks", blocks),
    Family("norm", norms),
    Family("activation", activation),
    Family("linear", linear),
    Family("linear_groups", linear_by_head),
    Family("linear_coded", linear_coded),
    Family("linear_fp8", linear_fp8),
    Family("rope_kv", rotation),
    Family("attention", attention),
    Family("states", states),
    Family("sampling", sampling),
    Family("penalties", penalties),
    Family("scaled_mm", scaled_mm),
)
"""All families except ``gather`` and ``all_reduce``, which need two GPUs."""
