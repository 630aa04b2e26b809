"""One launch of each kernel family on the device, compared with float64; the first thing to run on a GPU.

    python -m bench.gpu.smoke [--only linear attention] [--device cpu]

Order: load all modules, run the self-test kernels, capture ``torch.mm`` three times, then the families. A line is printed and
flushed before each launch, so that the last line names the kernel of a crash or a hang. Behind a launch: registers and
local-memory bytes of a thread, and blocks per multiprocessor. A family fails alone; exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.kernels import open_device
from quintet.executor.cuda.device import Argument, Device, Kernel, Size
from quintet.executor.cuda.ops.activation import Gate, gated
from quintet.executor.cuda.ops.blocks import BlockPool, copy_blocks
from quintet.executor.cuda.ops.draw import draw
from quintet.executor.cuda.ops.entries import DeviceReport
from quintet.executor.cuda.ops.linear import matmul, matvec
from quintet.executor.cuda.ops.linear_coded import coded_matmul
from quintet.executor.cuda.ops.linear_fp8 import fp8_matmul, fp8_quantize_reference
from quintet.executor.cuda.ops.linear_groups import head_matmul
from quintet.executor.cuda.ops.norm import add_rms_norm, layer_norm, rms_norm
from quintet.executor.cuda.ops.rope_kv import rope_kv, rope_kv_reference
from quintet.executor.cuda.sources import modules

BF16 = torch.bfloat16
UNIT = 2.0**-8
"""Half a unit in the last place of bf16, relative."""

Error = tuple[float, float]
"""Largest error beside float64, and its bound."""


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that are tried together."""

    name: str
    run: Callable[[Device], Error]


class LoggedDevice:
    """A device that prints each launch before it happens, waits for it, and prints what the kernel takes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: set[Kernel] = set()

    def launch(
        self, kernel: Kernel, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """See `Device`."""
        words = f"{kernel.module}.{kernel.name} grid {grid} block {block} shared {shared_bytes}"
        print(f"  launch {words}", flush=True)
        self._device.launch(kernel, grid, block, args, shared_bytes)
        self._device.synchronize()
        usage = getattr(self._device, "usage", None)
        if usage is not None and kernel not in self._seen:
            taken = usage(kernel, block[0] * block[1] * block[2], shared_bytes)
            print(
                f"    {taken.registers} registers, {taken.local_bytes} local bytes,"
                f" {taken.blocks_per_multiprocessor} blocks per multiprocessor",
                flush=True,
            )
        self._seen.add(kernel)

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)


def worst(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float) -> Error:
    """Return error and bound of the element that is nearest to or farthest beyond its bound."""
    error = (found.double().cpu() - exact.double().cpu()).abs()
    bounds = torch.as_tensor(bound, dtype=torch.float64).expand_as(error)
    at = int((error / bounds.clamp(min=1e-30)).flatten().nan_to_num(nan=float("inf")).argmax())
    return float(error.flatten()[at]), float(bounds.flatten()[at])


def drawn(device: Device, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return normal numbers in bf16 on the device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(BF16).to(device.torch_device)


def norms(device: Device) -> Error:
    """RMS norm, RMS norm of a sum, layer norm."""
    x, weight = drawn(device, 5, 4096), drawn(device, 4096)
    wide, factor = x.double().cpu(), weight.double().cpu()

    def rms(rows: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(1, keepdim=True) + 1e-5).rsqrt() * factor

    total, normed = add_rms_norm(device, x, x.clone(), weight, 1e-5)
    exact_layer = F.layer_norm(wide, (4096,), factor, factor, 1e-5)
    found = [
        (
            rms_norm(device, x, weight, 1e-5),
            rms(wide),
            3 * UNIT,
        ),  # rounded behind the norm and behind the weight
        (normed, rms(total.double().cpu()), 3 * UNIT),
        (layer_norm(device, x, weight, weight, 1e-5), exact_layer, 2 * UNIT),
    ]
    return max(
        (worst(y, exact, share * exact.abs() + 1e-5) for y, exact, share in found),
        key=lambda each: each[0] / each[1],
    )


def activation(device: Device) -> Error:
    """SiLU of one half times the other."""
    x = drawn(device, 5, 2048)
    gates, ups = x.double().cpu().chunk(2, 1)
    exact = F.silu(gates) * ups
    return worst(gated(device, x, Gate.SILU), exact, 3 * UNIT * exact.abs() + 1e-6)


def product_bound(x: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Bound of a product summed by tensor cores and rounded once: see ``tests/cuda/test_linear.py``."""
    slack = x.shape[1] * 2.0**-22 * (x.abs() @ weight.abs().T)
    return 1.01 * (slack + UNIT * (exact.abs() + slack))


def linear(device: Device) -> Error:
    """Our products of bf16, for one row, few rows and many."""
    weight = drawn(device, 320, 1024, scale=1024**-0.5)
    errors = []
    for rows, multiply in ((1, matvec), (1, matmul), (20, matmul), (50, matmul), (200, matmul)):
        x = drawn(device, rows, 1024)
        wide = x.double().cpu(), weight.double().cpu()
        exact = wide[0] @ wide[1].T
        errors.append(worst(multiply(device, x, weight), exact, product_bound(*wide, exact)))
    return max(errors, key=lambda each: each[0] / each[1])


def linear_by_head(device: Device) -> Error:
    """Products of rows in groups, as of experts."""
    x, weight = drawn(device, 9, 4 * 64), drawn(device, 4, 48, 64, scale=0.125)
    wide = x.double().cpu().unflatten(1, (4, 64))
    exact = torch.einsum("nhd,hcd->nhc", wide, weight.double().cpu()).flatten(1)
    return worst(head_matmul(device, x, weight), exact, 2 * UNIT * exact.abs() + 1e-3)


def linear_coded(device: Device) -> Error:
    """Products by int4, int8, fp8 and fp4 codes."""
    from tests.cuda.test_linear_coded import LAYOUTS, Rows

    errors = []
    for layout, num_rows in itertools.product(LAYOUTS.values(), (1, 40)):
        rows = Rows.draw(layout)
        x = drawn(device, num_rows, layout.depth)
        numbers, magnitudes = rows.numbers(layout)
        wide = x.double().cpu()
        exact = wide @ numbers.T
        slack = (layout.depth + 8) * 2.0**-22 * (wide.abs() @ magnitudes.T)
        found = coded_matmul(device, x, rows.on(device, layout))
        errors.append(worst(found, exact, 1.01 * (slack + UNIT * (exact.abs() + slack))))
    return max(errors, key=lambda each: each[0] / each[1])


def linear_fp8(device: Device) -> Error:
    """Products of e4m3 rows and e4m3 weights."""
    weight = drawn(device, 96, 512).to(torch.float8_e4m3fn)
    scales = torch.full((96,), 0.01, device=device.torch_device)
    x = drawn(device, 40, 512)
    codes, row_scales = fp8_quantize_reference(x.cpu())
    exact = (codes.double() @ weight.cpu().double().T) * (row_scales[:, None].double() * 0.01)
    return worst(fp8_matmul(device, x, weight, scales), exact, 2 * UNIT * exact.abs() + 1e-2)


def attention(device: Device) -> Error:
    """Decode rows and chunks over scattered blocks: tensor cores in bf16, the plain kernel in fp32."""
    from tests.cuda.attention_problem import Problem, Shape

    errors = []
    for shape in (
        Shape(num_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16),
        Shape(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32),
    ):
        problem = Problem(device, shape, [300, 70, 33])
        for rows in ([(299, 1), (69, 1), (32, 1)], [(100, 200), (0, 70), (32, 1)]):
            step = problem.run(rows)
            errors.append(worst(step.out, *step.expected()))
    return max(errors, key=lambda each: each[0] / each[1])


def rotation(device: Device) -> Error:
    """Rotation of queries and keys, and the write of keys and values into blocks."""
    from tests.cuda.test_rope_kv import make_world

    world = make_world(device, BF16, 128, 128)
    kv = world.kv.clone()
    q, k, v = world.heads
    expected = rope_kv_reference(q, k, v, world.cos, world.sin, kv, world.rows)
    queries = rope_kv(device, q, k, v, world.cos, world.sin, world.kv, world.rows)
    written = world.kv, kv
    return max(worst(found, exact, 1e-12) for found, exact in ((queries, expected), written))


def states(device: Device) -> Error:
    """Layers with a state, each over rows that continue and rows that begin."""
    from tests.cuda.test_states import FRESH, REFERENCES, UNIT, Blocks
    from tests.executor.state_problems import SHAPES, rows_of

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
    return max(errors, key=lambda each: each[0] / each[1])


def sampling(device: Device) -> Error:
    """Greedy draws, and log-probabilities of the most likely tokens."""
    logits = drawn(device, 6, 4099, scale=4.0)
    wide = logits.double().cpu()
    positions = torch.arange(6, dtype=torch.int32, device=device.torch_device)
    out = torch.zeros(6, dtype=torch.int32, device=device.torch_device)
    draw(device, logits, settings=None, slots=None, positions=positions, out=out)
    best = wide.max(1, keepdim=True).values
    lowest = (wide == best).to(torch.uint8).argmax(1)
    assert out.cpu().tolist() == lowest.tolist(), "greedy draws are not the lowest of the largest logits"
    found = DeviceReport(device)(logits, out, 5)
    exact = torch.log_softmax(wide, 1).sort(1, descending=True).values[:, :5]
    return worst(torch.from_numpy(np.ascontiguousarray(found.values[:, 1:])), exact, 1e-4)


def blocks(device: Device) -> Error:
    """Copies of KV blocks within the device."""
    memory = [drawn(device, 8, 2, 2, 16, 16) for _ in range(2)]
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
)


def self_test(device: Device) -> None:
    """Launch kernels whose results are known: atomics of all threads of all blocks."""
    where = device.torch_device
    count, highest = (torch.zeros(1, dtype=torch.int32, device=where) for _ in range(2))
    total = torch.zeros(1, device=where)
    device.launch(
        Kernel("selftest", "selftest_atomics", "ppp"), (3, 1, 1), (64, 1, 1), (count, highest, total)
    )
    device.synchronize()
    found = (int(count), int(highest), float(total))
    assert found == (192, 191, 96.0), f"selftest_atomics: {found}, expected (192, 191, 96.0)"


def capture_again(device: Device) -> None:
    """Capture a cuBLAS product and drop its graph, three times, in both kinds of pools."""
    x = drawn(device, 64, 64)
    out = torch.empty_like(x)

    def product() -> None:
        torch.mm(x, x, out=out)

    for capture in (device.capture, device.capture_timing):
        for _ in range(3):
            product()
            replay = capture(product)
            replay()
            device.synchronize()
            del replay
            gc.collect()


def attempt(name: str, run: Callable[[], object], report: Report) -> bool:
    """Run one part; report its time or its error. Return whether it succeeded."""
    print(f"{name} ...", flush=True)
    begun = time.perf_counter()
    try:
        run()
    except Exception as error:  # noqa: BLE001 - the other families are to be tried as well
        traceback.print_exc()
        report.remark(f"smoke: {name} FAILED: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return False
    print(f"{name}: {time.perf_counter() - begun:.2f} s", flush=True)
    return True


def try_family(family: Family, device: Device, report: Report) -> None:
    """Raise `AssertionError` if the family's error is beyond its bound."""
    error, bound = family.run(device)
    report.figure(Figure(f"smoke {family.name}: largest error", error, "", at_most=bound))
    assert error <= bound, f"error {error:.3g} beside float64, allowed {bound:.3g}"


def main() -> int:
    """Parse the command line and run; return 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [family.name for family in FAMILIES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these families")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_report_argument(parser)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    report = Report(arguments.figures)
    begun = time.perf_counter()
    opened = open_device(arguments.device)
    report.figure(Figure(f"smoke: {len(modules())} modules opened", time.perf_counter() - begun, "s"))
    device = cast(Device, LoggedDevice(opened))
    results = [
        attempt("self-test", lambda: self_test(device), report),
        attempt("capture again", lambda: capture_again(device), report),
    ]
    for family in FAMILIES:
        if family.name in arguments.only:
            results.append(
                attempt(family.name, lambda family=family: try_family(family, device, report), report)  # type: ignore[misc]
            )
    print(f"smoke: {sum(results)} of {len(results)} parts passed", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
