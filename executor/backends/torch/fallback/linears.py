"""Linear layers of a model of transformers, multiplied by the compiled kernels on a CPU.

Weights are packed as those of our own layers are, and the module keeps a place holder of the same shape that takes no memory. Who
looks at such a weight rather than calling its module computes nonsense, which the rehearsal finds: it compares with what was
computed before anything was packed.
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
    """Have the compiled kernels multiply in every plain linear layer; return how many there are.

    logits_dtype: of what the output layer gives, if it is one of them.
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
    """Have the output layer give float32, if it is a plain linear layer with torch's operators."""
    head = model.get_output_embeddings()
    if any(linear is head for linear in _plain_linears(model)):

        def forward(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            logits = multiply(rows, head.weight, head.bias, result_dtype=torch.float32)
            return logits.view(*x.shape[:-1], -1)

        vars(head)["forward"] = forward


def _plain_linears(model: PreTrainedModel) -> Iterator[torch.nn.Linear]:
    """Go through those that compute as torch's own: not subclasses, and nobody has hooked in."""
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
        hollow = torch.empty((1, 1), dtype=weight.dtype).expand(columns, depth)
        linear.weight = torch.nn.Parameter(hollow, requires_grad=False)


def _forward(
    packed: PackedWeight, bias: torch.Tensor | None, result_dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, packed.depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return packed.linear(rows, bias, result_dtype=result_dtype).view(*x.shape[:-1], packed.columns)

    return forward
