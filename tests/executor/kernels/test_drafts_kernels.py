"""Rows of several groups of tokens, such as those that verify drafts: threads divide their context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.executor.kernels.paged_requests import PLAIN, Features, Requests, Shape

from quintet.executor.backends.cpu.ops.host_library import open_library

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

BF16, FP16, FP32, INT8, INT4 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.quint4x2


@pytest.fixture(autouse=True)
def one_thread_after() -> Iterator[None]:
    """Restore the number of threads."""
    yield
    library = open_library()
    assert library is not None
    library.qt_set_threads(1, 0)


@pytest.mark.parametrize("features", [PLAIN, Features(window=1534)], ids=["plain", "window"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, INT8), (BF16, INT4), (FP32, INT4)],
)
def test_tokens_that_share_a_divided_context_have_the_bits_of_each_alone(
    dtype: torch.dtype, kv_dtype: torch.dtype, features: Features
) -> None:
    """9 and 30 tokens of 7 heads each are several groups, and threads divide their keys. The window of the first token alone
    reaches the first partition; the last tokens see one partition more than the first ones."""
    library = open_library()
    assert library is not None
    requests = Requests(Shape(dtype, 7, 1, 64, 32, kv_dtype), [2074])
    requests.run([(0, 0, 2044)], 0.2, features)
    expected = torch.cat([requests.run([(0, at, 1)], 0.2, features)[0] for at in range(2044, 2074)])
    for threads in (1, 2, 8):
        library.qt_set_threads(threads, 0)
        for count in (9, 30):
            [out] = requests.run([(0, 2044, count)], 0.2, features)
            assert torch.equal(out.view(torch.uint8), expected[:count].view(torch.uint8))
