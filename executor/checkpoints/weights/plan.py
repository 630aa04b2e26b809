"""Checkpoint tensors that a model expects: names, shapes and sinks.

A sink receives its tensor once and consumes it immediately: it copies, packs, quantizes, or keeps the mapped view. So
memory never holds two copies of a model. Independent of file formats and layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.checkpoints.weights.store import PackedStore

Sink = Callable[[torch.Tensor], object]
"""Consumes a tensor of the declared shape, in the checkpoint's number format, on the host. The tensor may be a read-only
view of a mapped file; a kept view keeps its pages."""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Rows taken from a checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the tensor."""
    rows: int
    take: Callable[[torch.Tensor], torch.Tensor]
    """Selects the rows of the tensor."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Format of a tensor that holds codes instead of floating-point values."""

    kinds: tuple[str, ...]
    """Allowed number formats, as in file headers; dummy tensors have the first."""
    dummies: tuple[int, int]
    """Range of its bytes in dummy weights."""


@dataclass(slots=True)
class Expected:
    """One expected name of the checkpoint."""

    shape: tuple[int, ...]
    scale: float
    """Standard deviation of dummy weights; 0: all ones (norms)."""
    sinks: list[Sink]
    packers: list[Sink]
    """Sinks that are skipped if the stores are opened on a packed cache."""
    codes: Codes | None = None
    """Format of coded tensors, which only the sink interprets; None: floating-point values."""


@dataclass(slots=True)
class WeightPlan:
    """Expected checkpoint tensors and their sinks. Models declare them, a loader delivers them."""

    dtype: torch.dtype
    device: torch.device
    expected: dict[str, Expected] = field(default_factory=dict)
    prefix: str = ""
    """Optional prefix of checkpoint names; expected names may have it or not."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Alternative checkpoint names by expected name."""
    ignored: tuple[str, ...] = ()
    """Name patterns (``*`` matches anything) of checkpoint tensors that are ignored."""
    on_other_ranks: set[str] = field(default_factory=set)
    """Name prefixes, up to a dot, of tensors that other ranks load."""
    stores: list[PackedStore] = field(default_factory=list)
    num_bytes: int = 0
    """Declared size of all weights in memory."""
    reservation: HugePages | None = None
    """Memory of the stores, after a loader has opened them in private memory."""

    def expect(
        self, name: str, shape: tuple[int, ...], sink: Sink, *, scale: float = 0.02, num_bytes: int = 0
    ) -> None:
        """Expect ``name`` and deliver it to ``sink``, which will hold ``num_bytes``.

        A name may be expected several times with one shape: a tied embedding, or a tensor that several layers share.
        """
        self._expected(name, shape, scale).sinks.append(sink)
        self.num_bytes += num_bytes

    def store(self, store: PackedStore) -> None:
        """Allocate memory for ``store`` before the delivery."""
        self.stores.append(store)
        self.num_bytes += store.num_bytes

    def pack(self, name: str, shape: tuple[int, ...], packer: Sink, *, scale: float = 0.02) -> None:
        """Expect ``name`` and deliver it to ``packer``, which fills a part of a store; skipped with a packed cache."""
        self._expected(name, shape, scale).packers.append(packer)

    def as_codes(self, name: str, kinds: tuple[str, ...], dummies: tuple[int, int]) -> None:
        """Declare the tensor expected under ``name`` as codes of one of these formats; see `Codes`."""
        self.expected[name].codes = Codes(kinds, dummies)

    def tensor(self, name: str, *shape: int, scale: float = 0.02) -> torch.Tensor:
        """Expect ``name`` of this shape; return the tensor it will fill."""
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.expect(name, shape, whole.copy_, scale=scale, num_bytes=whole.numel() * whole.element_size())
        return whole

    def floats(self, name: str, width: int) -> torch.Tensor:
        """Expect ``name`` ``[width]``; return it in fp32."""
        vector = torch.empty(width, dtype=torch.float32, device=self.device)
        self.expect(name, (width,), vector.copy_, num_bytes=vector.nbytes)
        return vector

    def ones(self, name: str, width: int) -> torch.Tensor:
        """Expect the weight of a norm."""
        return self.tensor(name, width, scale=0.0)

    def stacked(self, pieces: Sequence[PlannedRows], *rest: int) -> torch.Tensor:
        """Return one tensor ``[all rows, *rest]`` of concatenated rows of the checkpoint's tensors."""
        heights = [piece.rows for piece in pieces]
        whole = torch.empty((sum(heights), *rest), dtype=self.dtype, device=self.device)
        for piece, place in zip(pieces, whole.split(heights), strict=True):
            self.expect(
                piece.name,
                piece.shape,
                partial(_fill, place, piece.take),
                num_bytes=place.numel() * place.element_size(),
            )
        return whole

    def _expected(self, name: str, shape: tuple[int, ...], scale: float) -> Expected:
        known = self.expected.setdefault(name, Expected(shape, scale, [], []))
        assert known.shape == shape, f"{name} declared as {known.shape} and as {shape}"
        return known

    def release(self) -> None:
        """Release the sinks; size and reservation remain."""
        self.expected = {}
        self.stores = []


def _fill(place: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
    place.copy_(take(tensor))
