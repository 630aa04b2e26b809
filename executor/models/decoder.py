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

from quintet.executor.cards.spec import DecoderSpec
from quintet.executor.layers.linear import Embedding, GatedActivation, Linear, Part
from quintet.executor.layers.rope import Rope
from quintet.executor.models.forward import AttentionLayer, ForwardPass, ValueT
from quintet.executor.models.model import Setting
from quintet.executor.weights.plan import WeightPlan


@dataclass(frozen=True, slots=True)
class _Block:
    """Weights of one layer, with what is multiplied together stacked."""

    input_norm: torch.Tensor
    qkv: Linear
    attention: AttentionLayer
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A `quintet.executor.models.model.CausalModel`. Its layers are empty until a loader fills ``weights``."""

    def __init__(self, spec: DecoderSpec, setting: Setting) -> None:
        self.vocab_size = spec.vocab_size
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.windows: Sequence[int | None] = spec.windows
        self.rope = Rope(spec.rope, setting.device)
        self.weights = WeightPlan(setting.dtype, setting.device)
        self._eps = spec.rms_eps
        hidden = spec.hidden_size
        embedding = "model.embed_tokens"
        self._head = Linear(
            setting,
            self.weights,
            (Part(embedding if spec.tied else "lm_head", spec.vocab_size),),
            hidden,
            is_output_layer=True,
        )
        self._embedding = Embedding(
            self.weights, embedding, spec.vocab_size, hidden, self._head if spec.tied else None
        )
        self._blocks = [_block(setting, self.weights, spec, i) for i in range(len(spec.windows))]
        self._norm = self.weights.ones("model.norm.weight", hidden)

    def forward(self, ops: ForwardPass[ValueT]) -> ValueT:
        """See `CausalModel.forward`."""
        x = ops.embedding(self._embedding)  # [T, hidden]
        for block in self._blocks:
            qkv = ops.linear(block.qkv, ops.rms_norm(x, block.input_norm, self._eps))
            x = ops.linear(block.output, ops.attention(block.attention, qkv), x)
            gated = ops.linear(block.gate_up, ops.rms_norm(x, block.mlp_norm, self._eps))
            x = ops.linear(block.down, gated, x)
        return x

    def logits(self, ops: ForwardPass[ValueT], hidden: ValueT) -> ValueT:
        """See `CausalModel.logits`. The final norm is here: only rows that draw need it."""
        return ops.linear(self._head, ops.rms_norm(hidden, self._norm, self._eps))


def _block(setting: Setting, weights: WeightPlan, spec: DecoderSpec, index: int) -> _Block:
    """Declare the tensors of one layer under the names transformers gives them."""
    prefix = f"model.layers.{index}"
    attention, mlp, hidden = f"{prefix}.self_attn", f"{prefix}.mlp", spec.hidden_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    wide = spec.intermediate_size

    def head_norm(name: str) -> torch.Tensor | None:
        return weights.ones(f"{attention}.{name}.weight", spec.head_dim) if spec.qk_norm else None

    return _Block(
        input_norm=weights.ones(f"{prefix}.input_layernorm.weight", hidden),
        qkv=Linear(
            setting,
            weights,
            (
                Part(f"{attention}.q_proj", q_width),
                Part(f"{attention}.k_proj", kv_width),
                Part(f"{attention}.v_proj", kv_width),
            ),
            hidden,
            biased=spec.qkv_bias,
        ),
        attention=AttentionLayer(
            index=index,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rope.rotary_dim,
            scale=spec.head_dim**-0.5,
            window=spec.windows[index],
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            norm_eps=spec.rms_eps,
        ),
        output=Linear(
            setting, weights, (Part(f"{attention}.o_proj", hidden),), q_width, biased=spec.output_bias
        ),
        mlp_norm=weights.ones(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=Linear(
            setting,
            weights,
            (Part(f"{mlp}.gate_proj", wide), Part(f"{mlp}.up_proj", wide)),
            hidden,
            biased=spec.mlp_bias,
            activation=GatedActivation.SILU_AND_MUL,
        ),
        down=Linear(setting, weights, (Part(f"{mlp}.down_proj", hidden),), wide, biased=spec.mlp_bias),
    )
