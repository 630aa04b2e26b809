"""The attention benchmark runs and reports times; their values depend on the machine."""

from __future__ import annotations

import pytest
from bench.kernels import attention
from bench.kernels.limits import Limits, Multiply

from quintet.executor.backends.cpu.ops.host_library import open_library
from quintet.executor.backends.cpu.program.library import ProgramLibrary

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")


@pytest.mark.parametrize("numbers", [("bf16", "bf16"), ("bf16", "int8"), ("fp32", "fp32")])
@pytest.mark.parametrize("new", [1, 20])
def test_case_is_measured(numbers: tuple[str, str], new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = open_library()
    assert library is not None
    monkeypatch.setattr(attention, "TOTAL_BYTES", 1 << 20)
    case = attention.Case(2, 30, new, *attention.S, *numbers)
    timing = attention.measure(ProgramLibrary(library), Limits(library), case, repeats=1)
    assert timing.layer_us > 0
    assert timing.gflop_s > 0
    assert timing.limit_gflop_s > 0
    assert timing.limit_of in {kind.words for kind in Multiply}
    assert (timing.limit_of == Multiply.FLOATS.words) or numbers[0] == "bf16"
