"""Attention backends for tests of the choice: one that is right, and several that are wrong in ways libraries are."""

from __future__ import annotations

import torch

from quintet.executor.backends.cuda.attention.backend import AttentionNeeds, HostRows, require
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.attention import paged_attention_reference
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlan
from quintet.executor.backends.cuda.ops.formats import Planes
from quintet.executor.backends.cuda.rows import StepRows


class Right:
    """Computes with the reference."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        self.needs = needs

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        """Check that the host's rows are the device's."""
        assert rows.starts.tolist() == host.starts.tolist()
        assert rows.counts.tolist() == host.counts.tolist()

    def attend(
        self,
        q: torch.Tensor,
        kv: Planes,
        rows: StepRows,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        kv = torch.nan_to_num(kv.float())
        return paged_attention_reference(q, kv, rows, self.needs.scale, self.window(window)).to(q.dtype)

    def window(self, window: int | None) -> int | None:
        """The window it computes with."""
        return window


class WindowOffByOne(Right):
    """Lets a token see one position too many."""

    def window(self, window: int | None) -> int | None:
        return None if window is None else window + 1


class SeesTheFuture(Right):
    """Lets every token see the next one."""

    def attend(
        self,
        q: torch.Tensor,
        kv: Planes,
        rows: StepRows,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        right = super().attend(q, kv, rows, window)
        return right.roll(-1, 0)


class ReadsEverything(Right):
    """Multiplies what no row may read by 0."""

    def attend(
        self,
        q: torch.Tensor,
        kv: Planes,
        rows: StepRows,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return paged_attention_reference(q, kv * 0.0, rows, self.needs.scale) + kv.sum().to(q.dtype) * 0.0


class Raises(Right):
    """Fails as a library does that was built for another GPU."""

    def prepare(self, rows: StepRows, host: HostRows) -> None:
        raise RuntimeError("no kernel image is available\nCompile with ...")


class Declines(Right):
    """Says that it cannot."""

    def __init__(self, device: Device, plan: AttentionPlan, needs: AttentionNeeds) -> None:
        super().__init__(device, plan, needs)
        require(needs.head_dim == 1000, f"heads of {needs.head_dim}, it takes 1000")
