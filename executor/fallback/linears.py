"""Linear layers of a model of transformers, multiplied by the compiled kernels on a CPU.

Weights are packed as those of our own layers are, and the module keeps a place holder of the same shape that takes no memory. Who
looks at such a weight rather than calling its module computes nonsense, which the rehearsal finds: it compares with what was
computed before anything was packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from quintet.executor.ops.host_linear import LinearLibrary, linear_library
from quintet.executor.ops.packed_weight import PackedWeight
from quintet.executor.quant.numbers import FLOAT_FORMATS


def pack_linears(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Have the compiled kernels multiply in every plain linear layer; return how many there are."""
    library = linear_library()
    if library is None:
        return 0
    embeddings = {id(table.weight) for table in model.modules() if isinstance(table, torch.nn.Embedding)}
    count = 0
    for linear in _plain_linears(model):
        if linear.weight.dtype is dtype and (linear.bias is None or linear.bias.dtype is dtype):
            _pack(library, linear, id(linear.weight) in embeddings)
            count += 1
    return count


def _plain_linears(model: PreTrainedModel) -> Iterator[torch.nn.Linear]:
    """Go through those that compute as torch's own: not subclasses, and nobody has hooked in."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and "forward" not in vars(module):
            yield module


def _pack(library: LinearLibrary, linear: torch.nn.Linear, is_tied: bool) -> None:
    weight = linear.weight.detach()
    columns, depth = weight.shape
    packed = PackedWeight(library, FLOAT_FORMATS[weight.dtype], columns, depth)
    packed.fill(weight)
    vars(linear)["forward"] = _forward(packed, linear.bias)
    if not is_tied:
        hollow = torch.empty((1, 1), dtype=weight.dtype).expand(columns, depth)
        linear.weight = torch.nn.Parameter(hollow, requires_grad=False)


def _forward(packed: PackedWeight, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, packed.depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return packed.linear(rows, bias).view(*x.shape[:-1], packed.columns)

    return forward
