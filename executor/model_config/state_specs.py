"""Specifications of mixers with a state of fixed size: Mamba 1 and 2, short convolutions, the gated delta rule.

A layer's state is its convolution's, in the model's dtype, then its scan's, in float32. Each part is aligned to a
cache line. Imports no torch: `quintet.executor.models.sublayers` builds the mixers.

`KvNeed` is the memory of a layer without such a state, per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Self

from quintet.executor.model_config.norm_spec import NormSpec
from quintet.wire.config import SchedulerConfig
from quintet.wire.kv_spec import KvSpec

_LINE_BYTES, _FP32_BYTES = 64, 4

DRAFT_STATES_SHARE = 1 / 8
"""Maximum size of all draft states, as a share of the KV memory that they are added to. Also of a draft model's states."""
STATES_PER_REQUEST = 2
"""States of a draft model: after the known tokens, and after drafts. See `quintet.executor.speculation.draft_model`."""


@dataclass(frozen=True, slots=True)
class StateNeed:
    """State that one layer keeps per request, independent of length."""

    conv: tuple[int, int]
    """``taps - 1, channels``: the last inputs of the convolution."""
    scan: tuple[int, ...] = ()
    """Shape of the scan's state; empty without a scan."""

    def scan_offset(self, dtype_bytes: int) -> int:
        """Return the offset of the scan's part in bytes, for a dtype of ``dtype_bytes``."""
        return -(-prod(self.conv) * dtype_bytes // _LINE_BYTES) * _LINE_BYTES

    def num_bytes(self, dtype_bytes: int) -> int:
        """Return the total size in bytes."""
        return self.scan_offset(dtype_bytes) + (prod(self.scan) * _FP32_BYTES if self.scan else 0)


@dataclass(frozen=True, slots=True)
class StateDivision:
    """The dimension of a state mixer that ranks divide."""

    count: int
    groups: int
    """Groups of items with shared parts; a rank keeps the parts of every group that it has items of."""
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba (Gu and Dao, 2023): a gated short convolution, then a scan with input-dependent time steps, inputs and outputs."""

    channels: int
    state_size: int
    """State elements per channel."""
    dt_rank: int
    """Rank of the time-step projection."""
    taps: int
    """Kernel width of the convolution."""
    conv_bias: bool
    projection_bias: bool
    """True if the input and output projections have biases."""
    inner_norm: NormSpec | None = None
    """Norm of time steps, inputs and outputs (Jamba, FalconMamba)."""

    @property
    def chosen_width(self) -> int:
        """Width of the selection projection: time-step rank plus inputs and outputs."""
        return self.dt_rank + 2 * self.state_size

    @property
    def divided(self) -> StateDivision:
        """The dimension that ranks divide."""
        return StateDivision(self.channels, 1, "channels of states")

    def with_part(self, count: int, groups: int) -> Self:
        """Return the spec of a part with ``count`` channels."""
        return replace(self, channels=count)

    @property
    def state_need(self) -> StateNeed:
        """State per request."""
        return StateNeed((self.taps - 1, self.channels), (self.state_size, self.channels))

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        inner = 2 * self.dt_rank + 3 * self.state_size + self.taps
        return self.channels * (3 * hidden_size + inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """Mamba 2 (Dao and Gu, 2024): heads of channels with a common decay; one projection of the layer's input computes all."""

    num_heads: int
    head_dim: int
    groups: int
    """Number of groups; heads of a group share the state's inputs and outputs."""
    state_size: int
    taps: int
    conv_bias: bool
    projection_bias: bool
    output_bias: bool
    norm: NormSpec | None
    """Norm of the gated output, per group; None for none."""
    norm_before_gate: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """Range to which time steps are clamped."""
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of the projected gate, channels, inputs, outputs and time steps."""

    @property
    def divided(self) -> StateDivision:
        """See `MambaSpec.divided`."""
        return StateDivision(self.num_heads, self.groups, "heads of states")

    def with_part(self, count: int, groups: int) -> Self:
        """Return the spec of a part with ``count`` heads and ``groups`` groups."""
        return replace(self, num_heads=count, groups=groups)

    @property
    def channels(self) -> int:
        """Elements of all heads: the input width of ``out_proj``."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: channels, inputs and outputs."""
        return self.channels + 2 * self.groups * self.state_size

    @property
    def state_need(self) -> StateNeed:
        """State per request."""
        conv = (self.taps - 1, self.conv_channels)
        return StateNeed(conv, (self.num_heads, self.state_size, self.head_dim))

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        projected = 2 * self.channels + self.conv_channels + self.num_heads
        return hidden_size * projected + self.conv_channels * self.taps


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A short convolution between two gates (LFM2)."""

    channels: int
    """Equal to the hidden size."""
    taps: int
    biased: bool

    @property
    def divided(self) -> StateDivision:
        """See `MambaSpec.divided`."""
        return StateDivision(self.channels, 1, "channels of states")

    def with_part(self, count: int, groups: int) -> Self:
        """Return the spec of a part with ``count`` channels."""
        return replace(self, channels=count)

    @property
    def state_need(self) -> StateNeed:
        """State per request."""
        return StateNeed((self.taps - 1, self.channels))

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        return self.channels * (4 * hidden_size + self.taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A short convolution, then the gated delta rule (Yang, Kautz and Hatamizadeh, 2024); the output is normed and gated."""

    num_heads: int
    """Number of value heads."""
    head_dim: int
    key_heads: int
    """Number of query and key heads; each serves an equal number of value heads."""
    key_dim: int
    taps: int
    norm: NormSpec
    """Norm of each head's output."""
    by_head: bool = True
    """Checkpoint layout: True for two tensors grouped by key head (Qwen3-Next).

    False for four tensors: q, k, v; gates; alphas; betas (Qwen 3.5).
    """

    @property
    def divided(self) -> StateDivision:
        """See `Mamba2Spec.divided`."""
        return StateDivision(self.num_heads, self.key_heads, "heads of states")

    def with_part(self, count: int, groups: int) -> Self:
        """Return the spec of a part with ``count`` value heads and ``groups`` key heads."""
        return replace(self, num_heads=count, key_heads=groups)

    @property
    def keys(self) -> int:
        """Elements of all keys."""
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Elements of all values."""
        return self.num_heads * self.head_dim

    @property
    def state_need(self) -> StateNeed:
        """State per request."""
        conv = (self.taps - 1, 2 * self.keys + self.channels)
        return StateNeed(conv, (self.num_heads, self.key_dim, self.head_dim))

    def num_parameters(self, hidden_size: int) -> int:
        """Number of matrix elements."""
        projected = 2 * self.keys + 3 * self.channels + 2 * self.num_heads
        return hidden_size * projected + (2 * self.keys + self.channels) * self.taps


@dataclass(frozen=True, slots=True)
class KvNeed:
    """KV memory that one layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    """Elements of one head's key."""
    value_dim: int
    window: int | None = None
    """Number of recent tokens kept; None for all."""
    chunk: int | None = None
    """Chunk length in positions: only the current chunk's tokens are kept; None for all."""
    values_in_keys: bool = False
    """True if a value is a prefix of its key and needs no memory."""


def num_draft_states(scheduler: SchedulerConfig, kv: KvSpec, num_blocks: int) -> int:
    """Return the number of draft tokens per step with saved states, in each group; 0 without drafts or states.

    See `quintet.executor.speculation.draft_states`.
    """
    num_groups = sum(group.is_state for group in kv.groups)
    if scheduler.speculative is None or not num_groups:
        return 0
    of_request = scheduler.speculative.num_speculative_tokens
    fitting = int(DRAFT_STATES_SHARE * num_blocks) // num_groups
    return min(of_request * scheduler.max_num_seqs, max(of_request, fitting))


def num_draft_model_states(scheduler: SchedulerConfig, kv: KvSpec, num_blocks: int) -> int:
    """Return the number of requests with recurrent states of the draft model; 0 without such states. kv: of the served model."""
    draft = None if scheduler.speculative is None else scheduler.speculative.draft
    if draft is None or draft.states is None:
        return 0
    fitting = int(DRAFT_STATES_SHARE * num_blocks * kv.bytes_per_block)
    fitting //= STATES_PER_REQUEST * draft.states.bytes_per_block
    return min(scheduler.max_num_seqs, max(1, fitting))
