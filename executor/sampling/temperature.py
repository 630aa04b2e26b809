"""``temperature``: divide the logits."""

from __future__ import annotations

import torch

from quintet.executor.memory import to_device
from quintet.executor.sampling.settings import Settings


def divide_by_temperature(logits: torch.Tensor, settings: Settings) -> None:
    """Divide each row of ``logits [n, vocab]`` fp32 in place. Greedy rows are never passed."""
    temperatures = settings["temperature"]
    if (temperatures != 1.0).any():
        logits.div_(to_device(temperatures.copy(), logits.device).unsqueeze(1))
