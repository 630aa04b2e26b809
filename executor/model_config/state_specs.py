"""Mixers with a state of fixed size, as values: Mamba 1 and 2, short convolutions, the gated delta rule.

Imports no torch: see `quintet.executor.models.blocks` for what is made of them. A layer's state is that of its convolution, in
the model's number format, then that of its scan, in float32; each begins at a multiple of a cache line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Self

from quintet.executor.model_config.norm_spec import NormSpec

_LINE_BYTES, _FP32_BYTES = 64, 4


@dataclass(frozen=True, slots=True)
class StateNeed:
    """What one layer keeps of every request, however long."""

    conv: tuple[int, int]
    """``taps - 1, channels``: the last inputs of the convolution."""
    scan: tuple[int, ...] = ()
    """The shape of what is scanned with; empty: nothing is."""

    def scan_offset(self, dtype_bytes: int) -> int:
        """Return the bytes before the scan's part, in a model whose numbers have so many."""
        return -(-prod(self.conv) * dtype_bytes // _LINE_BYTES) * _LINE_BYTES

    def num_bytes(self, dtype_bytes: int) -> int:
        """Return the size of the whole."""
        return self.scan_offset(dtype_bytes) + (prod(self.scan) * _FP32_BYTES if self.scan else 0)


@dataclass(frozen=True, slots=True)
class StateDivision:
    """What ranks divide of a mixer with a state."""

    count: int
    groups: int
    """Who has some of a group has what the group shares."""
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba (Gu and Dao, 2023): a gated short convolution, then a scan whose step widths, inputs and outputs are chosen by it."""

    channels: int
    state_size: int
    """Numbers of the state behind each channel."""
    dt_rank: int
    """Width of what step widths are projected from."""
    taps: int
    """Inputs that the convolution sees."""
    conv_bias: bool
    projection_bias: bool
    """Of the projections in and out."""
    inner_norm: NormSpec | None = None
    """Of step widths, inputs and outputs before they are used (Jamba, FalconMamba)."""

    @property
    def chosen_width(self) -> int:
        """Numbers that all channels together choose: what step widths are made of, inputs and outputs."""
        return self.dt_rank + 2 * self.state_size

    @property
    def divided(self) -> StateDivision:
        """What ranks divide."""
        return StateDivision(self.channels, 1, "channels of states")

    def with_part(self, count: int, groups: int) -> Self:
        """Return what has so many of them."""
        return replace(self, channels=count)

    @property
    def state_need(self) -> StateNeed:
        """What it keeps."""
        return StateNeed((self.taps - 1, self.channels), (self.state_size, self.channels))

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices."""
        inner = 2 * self.dt_rank + 3 * self.state_size + self.taps
        return self.channels * (3 * hidden_size + inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """Mamba 2 (Dao and Gu, 2024): heads of channels that fade together; all is projected at once from the layer's input."""

    num_heads: int
    head_dim: int
    groups: int
    """Heads of a group share inputs and outputs of the state."""
    state_size: int
    taps: int
    conv_bias: bool
    projection_bias: bool
    output_bias: bool
    norm: NormSpec | None
    """Of the gated result, each group by itself; None: it is not normed."""
    norm_before_gate: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """What step widths are kept within."""
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Of gate, channels, inputs, outputs and step widths, as projected."""

    @property
    def divided(self) -> StateDivision:
        """See `MambaSpec.divided`."""
        return StateDivision(self.num_heads, self.groups, "heads of states")

    def with_part(self, count: int, groups: int) -> Self:
        """Return what has so many of them, of so many groups."""
        return replace(self, num_heads=count, groups=groups)

    @property
    def channels(self) -> int:
        """Numbers of all heads: what ``out_proj`` reads, as of every kind."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """What is convolved: channels, inputs and outputs."""
        return self.channels + 2 * self.groups * self.state_size

    @property
    def state_need(self) -> StateNeed:
        """What it keeps."""
        conv = (self.taps - 1, self.conv_channels)
        return StateNeed(conv, (self.num_heads, self.state_size, self.head_dim))

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices."""
        projected = 2 * self.channels + self.conv_channels + self.num_heads
        return hidden_size * projected + self.conv_channels * self.taps


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A short convolution between two gates (LFM2)."""

    channels: int
    """As many as the model is wide."""
    taps: int
    biased: bool

    @property
    def divided(self) -> StateDivision:
        """See `MambaSpec.divided`."""
        return StateDivision(self.channels, 1, "channels of states")

    def with_part(self, count: int, groups: int) -> Self:
        """Return what has so many of them."""
        return replace(self, channels=count)

    @property
    def state_need(self) -> StateNeed:
        """What it keeps."""
        return StateNeed((self.taps - 1, self.channels))

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices."""
        return self.channels * (4 * hidden_size + self.taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A short convolution, then the gated delta rule (Yang, Kautz and Hatamizadeh, 2024), its result normed and gated."""

    num_heads: int
    """Of values."""
    head_dim: int
    key_heads: int
    """Of queries and keys; each serves as many heads of values."""
    key_dim: int
    taps: int
    norm: NormSpec
    """Of each head's result."""
    by_head: bool = True
    """Whether the checkpoint has what belongs to a head of keys side by side, in two tensors (Qwen3-Next), rather than all
    queries, keys and values, all gates, all alphas and all betas (Qwen 3.5)."""

    @property
    def divided(self) -> StateDivision:
        """See `Mamba2Spec.divided`."""
        return StateDivision(self.num_heads, self.key_heads, "heads of states")

    def with_part(self, count: int, groups: int) -> Self:
        """Return what has so many of them, which meet so many heads of keys."""
        return replace(self, num_heads=count, key_heads=groups)

    @property
    def keys(self) -> int:
        """Numbers of all keys."""
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Numbers of all values."""
        return self.num_heads * self.head_dim

    @property
    def state_need(self) -> StateNeed:
        """What it keeps."""
        conv = (self.taps - 1, 2 * self.keys + self.channels)
        return StateNeed(conv, (self.num_heads, self.key_dim, self.head_dim))

    def num_parameters(self, hidden_size: int) -> int:
        """Numbers of its matrices."""
        projected = 2 * self.keys + 3 * self.channels + 2 * self.num_heads
        return hidden_size * projected + (2 * self.keys + self.channels) * self.taps
