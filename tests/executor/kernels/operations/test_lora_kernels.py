"""Adapters of a step's rows: the same bits as two products of the same packed matrices, in any mix of rows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from tests.executor.kernels.test_linear_kernels import FLOATS, bits, noise, pack, programs, set_threads

from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.program.step import CStep

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

NUM_ADAPTERS, MAX_TOKENS = 3, 420
MIXES: dict[str, list[tuple[int, int]]] = {
    "one row": [(2, 1)],
    "no adapter": [(0, 5), (0, 1)],
    "decode, interleaved": [(1, 1), (0, 1), (3, 1), (1, 1), (2, 1), (1, 1), (3, 1)],
    "adjacent": [(1, 1), (1, 3), (0, 2), (2, 13), (2, 1)],
    "prompts": [(3, 200), (0, 7), (1, 61), (3, 99), (2, 1), (1, 52)],
}
"""Rows of a step: adapter and number of tokens."""


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("depth", "rank", "columns"), [(1, 1, 1), (64, 8, 64), (67, 5, 130), (200, 66, 63)])
@pytest.mark.parametrize("together", [1, 2])
def test_mixes_of_rows(
    num_threads: int, dtype: torch.dtype, depth: int, rank: int, columns: int, together: int
) -> None:
    library, code = programs(), FLOAT_CODES[dtype]
    set_threads(num_threads)
    matrices = noise(4 * rank, depth, dtype=dtype).view(4, rank, depth)
    a = [pack(each, FLOATS[dtype], 0) for each in matrices]
    bundles = [pack(each.flatten(0, 1), FLOATS[dtype], 0) for each in matrices.split(together)]
    b = [pack(noise(columns, rank, dtype=dtype, seed=9 + i), FLOATS[dtype], 0) for i in range(NUM_ADAPTERS)]
    x, before = (
        noise(MAX_TOKENS, width + 3, dtype=dtype, seed=20 + width)[:, :width] for width in (depth, columns)
    )
    y = torch.empty(MAX_TOKENS, columns + 5, dtype=dtype)[:, :columns]
    handles = [
        (ctypes.c_void_p * len(weights))(*(each.handle for each in weights)) for weights in (bundles, b)
    ]
    program = library.new()
    library.lora(
        *(program, *map(ctypes.addressof, handles), NUM_ADAPTERS, x.data_ptr(), x.stride(0), MAX_TOKENS),
        *(code, y.data_ptr(), y.stride(0)),
    )
    for name, mix in MIXES.items():
        y.copy_(before)
        counts = np.array([count for _, count in mix])
        ends = np.cumsum(counts)
        starts, adapters = ends - counts, np.array([adapter for adapter, _ in mix])
        step = CStep(num_tokens=int(ends[-1]), num_rows=len(mix))
        for column, array in (("row_adapters", adapters), ("row_counts", counts), ("row_offsets", starts)):
            setattr(step, column, array.ctypes.data)
        library.run(program, ctypes.byref(step), 0, library.size(program))
        expected = before.clone()
        for (adapter, _), begin, end in zip(mix, starts.tolist(), ends.tolist(), strict=True):
            if adapter:
                low = a[adapter - 1].linear(x[begin:end])
                own = torch.empty(end - begin, columns, dtype=dtype).copy_(before[begin:end])
                expected[begin:end] = b[adapter - 1].linear(low, residual=own)
        assert torch.equal(bits(y.contiguous()), bits(expected)), name
    library.delete(program)
    set_threads(1)


def test_a_step_without_adapters_is_left_alone() -> None:
    library = programs()
    a, b = pack(noise(4, 8), FLOATS[torch.float32], 0), pack(noise(6, 4), FLOATS[torch.float32], 0)
    x, y = noise(3, 8), noise(3, 6, seed=1)
    before = y.clone()
    handles = [(ctypes.c_void_p * 1)(each.handle) for each in (a, b)]
    program = library.new()
    library.lora(
        *(program, *map(ctypes.addressof, handles), 1, x.data_ptr(), 8, 3),
        *(FLOAT_CODES[torch.float32], y.data_ptr(), 6),
    )
    library.run(program, ctypes.byref(CStep(num_tokens=3, num_rows=1)), 0, library.size(program))
    assert torch.equal(y, before)
    library.delete(program)
