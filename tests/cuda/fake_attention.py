"""Attention backends for tests of the choice: a correct one, and several with typical errors of libraries."""

from __future__ import annotations

import torch
from tests.cuda.kernels.references import paged_attention_reference

from quintet.executor.backends.cuda.attention.backend import AttentionNeeds, HostRows, require
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.tables import StepRows


class Correct:
    """Computes with the reference."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        self.needs = needs

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Check that the host's rows are the device's."""
        assert rows.starts.tolist() == host.starts.tolist()
        assert rows.counts.tolist() == host.counts.tolist()

    def attend(self, q: torch.Tensor, kv: Planes, rows: StepRows, window: int | None) -> torch.Tensor:
        """As `AttentionBackend.attend`."""
        kv = torch.nan_to_num(kv.float())
        return paged_attention_reference(q, kv, rows, self.needs.scale, self.window(window)).to(q.dtype)

    def window(self, window: int | None) -> int | None:
        """The window it computes with."""
        return window


class WindowOffByOne(Correct):
    """Adds one position before the window."""

    def window(self, window: int | None) -> int | None:
        return None if window is None else window + 1


class SeesNextToken(Correct):
    """Adds the next position for every token."""

    def attend(self, q: torch.Tensor, kv: Planes, rows: StepRows, window: int | None) -> torch.Tensor:
        right = super().attend(q, kv, rows, window)
        return right.roll(-1, 0)


class ReadsMaskedPositions(Correct):
    """Multiplies masked positions by 0."""

    def attend(self, q: torch.Tensor, kv: Planes, rows: StepRows, window: int | None) -> torch.Tensor:
        return paged_attention_reference(q, kv * 0.0, rows, self.needs.scale) + kv.sum().to(q.dtype) * 0.0


class Raises(Correct):
    """Fails as a library built for another GPU does."""

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        raise RuntimeError("no kernel image is available\nCompile with ...")


class Declines(Correct):
    """Declines the plan."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        super().__init__(device, plan, needs)
        require(needs.head_dim == 1000, f"heads of {needs.head_dim}, it takes 1000")
