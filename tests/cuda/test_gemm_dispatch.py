"""Choice of the GEMM backend, by a fake clock, and correct products of every backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from tests.cuda.rank_choices import chosen_by

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears, GemmBackend, captured_stopwatch
from quintet.executor.backends.cuda.ops.linear import matmul, matvec
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.models.layers.linear import Linear

CUBLAS, MATMUL, MATVEC = GemmBackend.CUBLAS, GemmBackend.MATMUL, GemmBackend.MATVEC


def layer(
    device: Device, columns: int, depth: int, seed: int = 0, result_dtype: torch.dtype | None = None
) -> Linear:
    """The inspected attributes of a layer."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(columns, depth, generator=generator).to(torch.bfloat16).to(device.torch_device)
    bias = torch.randn(columns, generator=generator).to(torch.bfloat16).to(device.torch_device)
    method, shape = SimpleNamespace(table=table, bias=bias), SimpleNamespace(result_dtype=result_dtype)
    return cast("Linear", SimpleNamespace(method=method, shape=shape, columns=columns))


def clock(times: list[float]) -> Callable[[Callable[[], None]], float]:
    """Return these times, one after the other, without running the timed function."""
    left: Iterator[float] = iter(times)
    return lambda run: next(left)


def rows_to_backends(linears: DeviceLinears, weight: torch.Tensor) -> dict[int, GemmBackend]:
    return {rows: linears.backend_for(weight, rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65, 4096)}


def test_faster_backend_is_used_up_to_its_number_of_rows(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    linears, one = DeviceLinears(device, batch_invariant=False), layer(device, 24, 64)
    weight = one.method.table
    assert weight is not None
    assert set(rows_to_backends(linears, weight).values()) == {CUBLAS}
    with caplog.at_level(logging.INFO, "quintet"):
        # For each of 1, 2 and 4 rows: cuBLAS, matmul, matvec; for 8, 16, 32 and 64: cuBLAS, matmul.
        linears.measure([one], clock([5, 6, 4, 5, 4, 6, 5, 4.95, 6, 5, 4, 5, 6, 5, 6, 5, 4]))
    assert rows_to_backends(linears, weight) == {
        1: MATVEC,
        2: MATMUL,
        3: CUBLAS,  # as 4 rows, where our kernel is faster by less than the noise
        4: CUBLAS,
        5: MATMUL,
        8: MATMUL,
        9: CUBLAS,
        16: CUBLAS,
        17: CUBLAS,
        64: MATMUL,
        65: CUBLAS,
        4096: CUBLAS,
    }
    assert [record.getMessage() for record in caplog.records] == [
        "linear layers of 1, 2, 4, 8, 16, 32, 64 rows: 24x64 bf16 matvec matmul cublas matmul cublas cublas matmul;"
        " more rows: cublas"
    ]
    assert linears.backend_for(weight[:16], 1) is CUBLAS, "a shape that was not measured"


def test_batch_invariant_uses_own_kernels_in_one_order(device: Device) -> None:
    linears, one = DeviceLinears(device, batch_invariant=True), layer(device, 24, 64)
    weight = one.method.table
    assert weight is not None
    linears.measure([one], clock([]))
    assert set(rows_to_backends(linears, weight).values()) == {MATMUL}


def test_rank_0_chooses_for_all(device: Device) -> None:
    """Rank 0's times decide, so every rank rounds alike. A shape that rank 0 lacks is chosen by each rank itself."""
    layers = [[layer(device, 24, 64), layer(device, 33 - rank, 64)] for rank in range(3)]
    clocks = ([5, 6, 4] * 3 + [5, 4] * 4) * 2, [6, 5, 7] * 3 + [5, 6] * 4

    def choose(ranks: Ranks) -> list[dict[int, GemmBackend]]:
        rank = ranks.share.rank
        linears = DeviceLinears(device, batch_invariant=False)
        linears.measure(layers[rank], clock([*clocks[min(rank, 1)]]), ranks)
        return [
            rows_to_backends(linears, one.method.table)
            for one in layers[rank]
            if one.method.table is not None
        ]

    first, *others = chosen_by(3, choose)
    assert [each[0] for each in others] == [first[0]] * 2
    assert first[0][1] is MATVEC and first[0][64] is MATMUL
    assert [each[1][1] for each in others] == [MATMUL] * 2


def test_weight_unsupported_by_own_kernels_is_not_timed(device: Device) -> None:
    linears, one = DeviceLinears(device, batch_invariant=False), layer(device, 24, 60)
    linears.measure([one], clock([5] * 7))
    assert one.method.table is not None
    assert linears.backend_for(one.method.table, 1) is CUBLAS


def test_layers_of_one_shape_are_timed_round_robin(device: Device) -> None:
    """Then a weight is read from memory as in a step, not from a cache filled by the previous run."""
    layers = [layer(device, 16, 64, seed) for seed in range(3)]
    linears = DeviceLinears(device, batch_invariant=False)
    multiplied: list[int] = []
    run_one = linears._run

    def watched(
        way: GemmBackend, x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None
    ) -> torch.Tensor:
        multiplied.append(weight.data_ptr())
        return run_one(way, x, weight, *rest)

    linears._run = watched  # type: ignore[method-assign,assignment]
    captured_ms = captured_stopwatch(device, repeats=1)

    def count(run: Callable[[], None]) -> float:
        del multiplied[:]
        took = captured_ms(run)
        each = [one.method.table.data_ptr() for one in layers if one.method.table is not None]
        assert multiplied[:3] == each and len(multiplied) % 3 == 0
        return took

    linears.measure(layers, count)
    assert multiplied


@pytest.mark.parametrize("backend", list(GemmBackend))
def test_products_of_every_backend(device: Device, backend: GemmBackend) -> None:
    """cuBLAS against itself; our kernels against those with tests of their own."""
    one = layer(device, 24, 64)
    weight, bias = one.method.table, one.method.bias
    assert weight is not None and bias is not None
    x = torch.randn(3, 64).to(torch.bfloat16).to(device.torch_device)
    linears = DeviceLinears(device, batch_invariant=False)
    linears.measure(
        [one], clock([1 if backend is tried else 2 for tried in [CUBLAS, MATMUL, MATVEC] * 3] + [1, 1] * 4)
    )
    assert linears.backend_for(weight, 3) is backend
    expected = {
        CUBLAS: lambda: F.linear(x, weight, bias),
        MATMUL: lambda: matmul(device, x, weight, bias),
    }.get(backend, lambda: matvec(device, x, weight, bias))()
    assert torch.equal(linears.apply(one, x), expected)
    out = torch.empty_like(expected)
    assert linears.apply(one, x, out) is out
    if backend is CUBLAS:  # which may add the bias in another kernel when the output is preallocated
        torch.testing.assert_close(out, expected)  # two roundings to bf16 at most: 2^-7, of the default 2^-6
    else:
        assert torch.equal(out, expected)
    bare = linears.multiply(x, weight)
    assert not torch.equal(bare, expected)
    torch.testing.assert_close(linears.multiply(x, weight, None, out), bare)  # as above


@pytest.mark.parametrize("backend", list(GemmBackend))
def test_output_layer_gives_float32_with_every_backend(device: Device, backend: GemmBackend) -> None:
    one = layer(device, 24, 64, result_dtype=torch.float32)
    weight, bias = one.method.table, one.method.bias
    assert weight is not None and bias is not None
    x = torch.randn(3, 64).to(torch.bfloat16).to(device.torch_device)
    linears = DeviceLinears(device, batch_invariant=False)
    linears.measure(
        [one], clock([1 if backend is tried else 2 for tried in [CUBLAS, MATMUL, MATVEC] * 3] + [1, 1] * 4)
    )
    y = linears.apply(one, x)
    assert y.dtype is torch.float32
    exact = x.double() @ weight.double().t() + bias.double()
    magnitudes = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert bool(((y - exact).abs() <= 65 * 2.0**-22 * magnitudes).all())
