"""The pre-norm decoder with rotary positions and a gated feed-forward: Llama and everything shaped like it.

One block, top to bottom::

    x ──┬─ norm ─ q,k,v ─ (q,k norm) ─ rope ─ attention over the cache ─ o ─┐
        └───────────────────────────────────────────────────────────────── + ──┬─ norm ─ gate,up ─ silu·mul ─ down ─┐
                                                                              └──────────────────────────────────── + ── x

Families differ in the numbers and switches of `DecoderSpec` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quintet.executor.batch import Batch
from quintet.executor.layers.linear import Linear
from quintet.executor.layers.rope import Rope, RopeSpec
from quintet.executor.models.model import Setting
from quintet.executor.weights.plan import WeightPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything that tells one such model from another."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """Sliding window of each layer; None where it sees everything."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before rotation (Qwen3)."""
    tied: bool = False
    """Whether the output layer is the embedding."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Weights of one layer, with what is multiplied together stacked."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A `quintet.executor.models.model.CausalModel`. Its tensors are empty until a loader fills ``weights``."""

    def __init__(self, spec: DecoderSpec, setting: Setting) -> None:
        self.vocab_size = spec.vocab_size
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.windows: Sequence[int | None] = spec.windows
        self.needs_lengths = spec.rope.depends_on_length
        self.weights = WeightPlan(setting.dtype, setting.device)
        self._spec = spec
        self._ops = setting.ops
        self._dtype = setting.dtype
        self._rope = Rope(spec.rope, setting.device)
        self._embedding = self.weights.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._blocks = [_block(self.weights, spec, f"model.layers.{i}") for i in range(len(spec.windows))]
        self._norm = self.weights.ones("model.norm.weight", spec.hidden_size)
        self._head = Linear(
            self._embedding
            if spec.tied
            else self.weights.tensor("lm_head.weight", spec.vocab_size, spec.hidden_size)
        )

    def pack(self) -> None:
        """See `CausalModel.pack`. One layer at a time, so that only one is in memory twice."""
        self.weights.release()
        for block in self._blocks:
            for linear in (block.qkv, block.output, block.gate_up, block.down):
                linear.pack(self._ops)
        self._head.pack(self._ops)

    def forward(self, batch: Batch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `CausalModel.forward`."""
        ops, spec = self._ops, self._spec
        heads, kv_heads, eps = spec.num_heads, spec.num_kv_heads, spec.rms_eps
        scale = spec.head_dim**-0.5
        cos, sin = self._rope.cos_sin(batch.positions, batch.lengths, self._dtype)
        x = ops.embedding(batch.token_ids, self._embedding)  # [T, hidden]
        for block, window, cache in zip(self._blocks, spec.windows, kv, strict=True):
            normed = ops.rms_norm(x, block.input_norm, eps)
            qkv = block.qkv(normed).view(batch.num_tokens, -1, spec.head_dim)
            if block.q_norm is not None and block.k_norm is not None:
                qkv[:, :heads] = ops.rms_norm(qkv[:, :heads], block.q_norm, eps)
                qkv[:, heads : heads + kv_heads] = ops.rms_norm(
                    qkv[:, heads : heads + kv_heads], block.k_norm, eps
                )
            q = ops.rope_kv_write(qkv, heads, kv_heads, cos, sin, cache, batch.kv_write)
            attended = ops.paged_attention(q, cache, batch.attention[window], scale)
            x = x + block.output(attended.reshape(batch.num_tokens, -1))
            normed = ops.rms_norm(x, block.mlp_norm, eps)
            gated = ops.silu_and_mul(block.gate_up(normed))
            x = x + block.down(gated)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalModel.logits`. The final norm is here: only rows that draw need it."""
        return self._head(self._ops.rms_norm(hidden, self._norm, self._spec.rms_eps))


def _block(weights: WeightPlan, spec: DecoderSpec, prefix: str) -> _Block:
    """Declare the tensors of one layer under the names transformers gives them."""
    attention, mlp, hidden = f"{prefix}.self_attn", f"{prefix}.mlp", spec.hidden_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    wide = spec.intermediate_size

    def linear(names: tuple[str, ...], heights: tuple[int, ...], width: int, biased: bool) -> Linear:
        weight = weights.fused(tuple(f"{name}.weight" for name in names), heights, (width,))
        return Linear(
            weight, weights.fused(tuple(f"{name}.bias" for name in names), heights, ()) if biased else None
        )

    def head_norm(name: str) -> torch.Tensor | None:
        return weights.ones(f"{attention}.{name}.weight", spec.head_dim) if spec.qk_norm else None

    qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
    return _Block(
        input_norm=weights.ones(f"{prefix}.input_layernorm.weight", hidden),
        qkv=linear(qkv, (q_width, kv_width, kv_width), hidden, spec.qkv_bias),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        output=linear((f"{attention}.o_proj",), (hidden,), q_width, spec.output_bias),
        mlp_norm=weights.ones(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=linear((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (wide, wide), hidden, spec.mlp_bias),
        down=linear((f"{mlp}.down_proj",), (hidden,), wide, spec.mlp_bias),
    )
