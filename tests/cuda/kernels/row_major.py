"""Row-major weights in torch tensors, as on a GPU, for an emulated device over host memory."""

from __future__ import annotations

from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape
from quintet.executor.checkpoints.quant.packed import RowMajorLinear
from quintet.executor.checkpoints.quant.stack import RowMajorStack, StackMethod, StackShape
from quintet.executor.checkpoints.weights.plan import WeightPlan


class RowMajor:
    """A `Quantization` that never packs weights for the host's kernels."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        return RowMajorLinear(shape, plan)

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        return None

    def pairs(self, shape: LinearShape, plan: WeightPlan) -> bool:
        return True

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        return RowMajorStack(shape, plan)
