"""Linear layers in bf16 on a CPU with the kernel of ``csrc/cpu/linear.cpp``.

Unlike oneDNN's, its result for a row has the same bits whatever the batch.
"""

from __future__ import annotations

import torch

from quintet.executor.ops.host_library import HostLibrary, host_library
from quintet.executor.ops.linear import LinearFunction, pack_linear_on_host


def pack_linear_in_tiles(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearFunction:
    """Return the layer of ``weight [out, in]`` and ``bias [out]``, the weight copied; see `pack_linear`.

    Other dtypes than bf16, and machines without the kernel, are oneDNN's.
    """
    library = host_library()
    if library is None or weight.dtype is not torch.bfloat16:
        return pack_linear_on_host(weight, bias)
    return _TiledLinear(library, weight, bias)


class _TiledLinear:
    """A packed weight. Callable as a `LinearFunction`."""

    __slots__ = ("_bias", "_bias_address", "_depth", "_library", "_packed", "_packed_address", "_width")

    def __init__(self, library: HostLibrary, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._library = library
        weight = weight.contiguous()
        self._width, self._depth = weight.shape
        self._packed = torch.empty(
            library.linear_packed_size(self._width, self._depth) or 0, dtype=torch.bfloat16
        )
        self._packed_address = self._packed.data_ptr()
        library.linear_pack(weight.data_ptr(), self._depth, self._width, self._depth, self._packed_address)
        assert bias is None or (bias.dtype is torch.bfloat16 and bias.shape == (self._width,)), bias
        self._bias = None if bias is None else bias.contiguous()
        self._bias_address = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``; x: ``[num_tokens, in]``."""
        if x.dim() != 2 or x.shape[1] != self._depth or x.dtype is not torch.bfloat16:
            raise ValueError(f"x is {x.dtype}{list(x.shape)}; expected bfloat16[num_tokens, {self._depth}]")
        if x.stride(1) != 1:
            x = x.contiguous()
        num_tokens = x.shape[0]
        y = torch.empty((num_tokens, self._width), dtype=torch.bfloat16)
        self._library.linear(
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            self._width,
            self._depth,
            self._packed_address,
            self._bias_address,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y
