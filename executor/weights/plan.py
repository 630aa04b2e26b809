"""What a model expects of a checkpoint: names, shapes and destinations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class WeightPlan:
    """Checkpoint names to the (parts of) tensors they fill.

    Models fuse what they multiply together (query, key and value; gate and up): then several names fill parts of one
    tensor.
    """

    dtype: torch.dtype
    device: torch.device
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    """Standard deviation of each name's dummy weights; 0 means that all are 1 (norms)."""
    released_bytes: int = 0
    """What `num_bytes` was before `release`."""

    def tensor(self, name: str, *shape: int, scale: float = 0.02) -> torch.Tensor:
        """Expect ``name`` of this shape; return the tensor it will fill."""
        return self.fused((name,), (shape[0],), shape[1:], scale)

    def ones(self, name: str, width: int) -> torch.Tensor:
        """Expect the weight of a norm."""
        return self.fused((name,), (width,), (), 0.0)

    def fused(
        self, names: tuple[str, ...], heights: tuple[int, ...], rest: tuple[int, ...], scale: float = 0.02
    ) -> torch.Tensor:
        """Expect each name with its number of rows; return the one tensor that stacks them."""
        whole = torch.empty((sum(heights), *rest), dtype=self.dtype, device=self.device)
        begin = 0
        for name, height in zip(names, heights, strict=True):
            self.targets[name] = whole[begin : begin + height]
            self.scales[name] = scale
            begin += height
        return whole

    def release(self) -> None:
        """Let go of the tensors; only their size stays known."""
        self.released_bytes = self.num_bytes
        self.targets = {}

    @property
    def num_bytes(self) -> int:
        """Size of all weights in memory."""
        return self.released_bytes or sum(
            target.numel() * target.element_size() for target in self.targets.values()
        )
