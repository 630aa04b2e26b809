"""What a model expects of a checkpoint: names, shapes, and who takes each tensor.

A sink is handed its tensor once, at once does with it what it must (copies, packs, quantizes, or keeps the view of the
mapped file) and lets go: so there are never two copies of a model in memory. Knows no file format and no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.checkpoints.weights.store import PackedStore

Sink = Callable[[torch.Tensor], object]
"""Takes a tensor of the declared shape, in the checkpoint's number format, on the host. It may be a view of a mapped file:
never written to, and kept only where the memory it occupies is meant to be kept."""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Rows that are taken from a tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    """The tensor's."""
    rows: int
    take: Callable[[torch.Tensor], torch.Tensor]
    """From the tensor to the rows."""


@dataclass(frozen=True, slots=True)
class Codes:
    """What a tensor is that has no floating-point numbers of the model."""

    kinds: tuple[str, ...]
    """Number formats that it may have, as the headers of files name them; dummy ones have the first."""
    dummies: tuple[int, int]
    """Between what its bytes lie in dummy weights."""


@dataclass(slots=True)
class Expected:
    """One name of the checkpoint."""

    shape: tuple[int, ...]
    scale: float
    """Standard deviation of dummy weights; 0 means that all are 1 (norms)."""
    sinks: list[Sink]
    packers: list[Sink]
    """Sinks that need not be called where the stores were opened on what was packed before."""
    codes: Codes | None = None
    """Of a tensor whose numbers are not what they look like: its sink knows what they mean."""


@dataclass(slots=True)
class WeightPlan:
    """Checkpoint names to what takes them. Models declare, a loader delivers."""

    dtype: torch.dtype
    device: torch.device
    expected: dict[str, Expected] = field(default_factory=dict)
    prefix: str = ""
    """What names of a checkpoint begin with or not, whatever the expected ones do."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Expected names to others under which a checkpoint may have the tensor instead."""
    ignored: tuple[str, ...] = ()
    """Patterns (``*`` for anything) of names that a checkpoint may have although nobody expects them."""
    elsewhere: set[str] = field(default_factory=set)
    """What names begin with, up to a dot, of which other ranks take all."""
    stores: list[PackedStore] = field(default_factory=list)
    num_bytes: int = 0
    """Size of all weights in memory, as far as it was declared."""
    reservation: HugePages | None = None
    """What the stores lie in, once a loader has opened them in memory of this process alone."""

    def expect(
        self, name: str, shape: tuple[int, ...], sink: Sink, *, scale: float = 0.02, num_bytes: int = 0
    ) -> None:
        """Expect ``name`` and have it delivered to ``sink``, which will hold ``num_bytes``.

        A name may be expected several times, with one shape: a tied embedding, or what several layers' parts are taken from.
        """
        self._expected(name, shape, scale).sinks.append(sink)
        self.num_bytes += num_bytes

    def store(self, store: PackedStore) -> None:
        """Give ``store`` memory before anything is delivered."""
        self.stores.append(store)
        self.num_bytes += store.num_bytes

    def pack(self, name: str, shape: tuple[int, ...], packer: Sink, *, scale: float = 0.02) -> None:
        """Expect ``name`` and have it delivered to ``packer``, which fills a part of a store, unless that is full already."""
        self._expected(name, shape, scale).packers.append(packer)

    def as_codes(self, name: str, kinds: tuple[str, ...], dummies: tuple[int, int]) -> None:
        """Say that the tensor expected under ``name`` is of one of these kinds; see `Codes`."""
        self.expected[name].codes = Codes(kinds, dummies)

    def tensor(self, name: str, *shape: int, scale: float = 0.02) -> torch.Tensor:
        """Expect ``name`` of this shape; return the tensor it will fill."""
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.expect(name, shape, whole.copy_, scale=scale, num_bytes=whole.numel() * whole.element_size())
        return whole

    def floats(self, name: str, width: int) -> torch.Tensor:
        """Expect ``name`` ``[width]``; return it in fp32, whatever the model computes in."""
        vector = torch.empty(width, dtype=torch.float32, device=self.device)
        self.expect(name, (width,), vector.copy_, num_bytes=vector.nbytes)
        return vector

    def ones(self, name: str, width: int) -> torch.Tensor:
        """Expect the weight of a norm."""
        return self.tensor(name, width, scale=0.0)

    def stacked(self, pieces: Sequence[PlannedRows], *rest: int) -> torch.Tensor:
        """Return one tensor ``[all rows, *rest]`` that pieces of the checkpoint's tensors will fill, one below the other."""
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
        """Let go of the sinks; only the size and the reservation stay known."""
        self.expected = {}
        self.stores = []


def _fill(place: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
    place.copy_(take(tensor))
