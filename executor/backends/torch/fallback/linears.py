"""Linear layers of a model of transformers on the compiled CPU kernels.

The weights are packed like those of our layers; the module keeps a placeholder of the same shape without memory. Code that reads
such a weight directly would compute wrong results. The self-check detects that: it compares with logits from before packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from quintet.executor.backends.cpu.ops.host_linear import LinearLibrary, linear_library
from quintet.executor.backends.cpu.ops.linear import linear as multiply
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.quant.packed_formats import FLOAT_FORMATS


def pack_linears(model: PreTrainedModel, dtype: torch.dtype, logits_dtype: torch.dtype) -> int:
    """Make the compiled kernels compute every plain linear layer; return the number of such layers.

    logits_dtype: result dtype of the output layer.
    """
    library = linear_library()
    if library is None:
        return 0
    embeddings = {id(table.weight) for table in model.modules() if isinstance(table, torch.nn.Embedding)}
    head, count = model.get_output_embeddings(), 0
    for linear in _plain_linears(model):
        if linear.weight.dtype is dtype and (linear.bias is None or linear.bias.dtype is dtype):
            result_dtype = logits_dtype if linear is head else dtype
            _pack(library, linear, id(linear.weight) in embeddings, result_dtype)
            count += 1
    return count


def keep_logit_sums(model: PreTrainedModel) -> None:
    """Make the output layer return float32, if it is a plain linear layer computed by torch."""
    head = model.get_output_embeddings()
    if any(linear is head for linear in _plain_linears(model)):

        def forward(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            logits = multiply(rows, head.weight, head.bias, result_dtype=torch.float32)
            return logits.view(*x.shape[:-1], -1)

        vars(head)["forward"] = forward


def _plain_linears(model: PreTrainedModel) -> Iterator[torch.nn.Linear]:
    """Yield exact instances of `torch.nn.Linear` without a replaced ``forward``."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and "forward" not in vars(module):
            yield module


def _pack(library: LinearLibrary, linear: torch.nn.Linear, is_tied: bool, result_dtype: torch.dtype) -> None:
    weight = linear.weight.detach()
    columns, depth = weight.shape
    packed = PackedWeight(library, FLOAT_FORMATS[weight.dtype], columns, depth)
    packed.fill(weight)
    vars(linear)["forward"] = _forward(packed, linear.bias, result_dtype)
    if not is_tied:
        placeholder = torch.empty((1, 1), dtype=weight.dtype).expand(columns, depth)
        linear.weight = torch.nn.Parameter(placeholder, requires_grad=False)


def _forward(
    packed: PackedWeight, bias: torch.Tensor | None, result_dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, packed.depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return packed.linear(rows, bias, result_dtype=result_dtype).view(*x.shape[:-1], packed.columns)

    return forward
