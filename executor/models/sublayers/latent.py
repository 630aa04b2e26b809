"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1) with absorbed projections.

KV memory holds a token's latent and its shared rotated key. The key projection is absorbed into queries and the value
projection into outputs, so all heads attend to the latent directly::

    x ─┬─ (q_a ─ norm ─) q_b ─ by head: [plain ─ key matrix, transposed | rotated] ─ queries ─┐
       └─ kv_a ─ [latent ─ norm | rotated] ─ key, which begins with the value ──────────── attention
                                        output ─ by head: value matrix ─────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quintet.executor.checkpoints.quant.stack import StackPiece, StackShape
from quintet.executor.model_config.spec import LatentSpec
from quintet.executor.models.forward import ForwardPass, ValueT
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.layers.linear import HeadLinear
from quintet.executor.models.layers.norm import Norm
from quintet.executor.models.sublayers.scope import Scope


class Latent:
    """A `quintet.executor.models.sublayers.layer.Sublayer`."""

    def __init__(self, scope: Scope, spec: LatentSpec) -> None:
        assert scope.layer is not None
        names, hidden, heads = scope.names, scope.hidden_size, scope.share.of(spec.num_heads)
        queries = heads.times(spec.plain_dim + spec.rope_dim)
        if spec.q_rank is None:
            first = scope.part(names.q, queries.whole).keeping(queries)
        else:
            first = scope.part(names.q_a, spec.q_rank)
        self._first_width, self._spec = first.rows, spec
        self._latents = scope.linear(
            [first, scope.part(names.kv_a, spec.head_dim)], hidden, biased=spec.biased
        )
        self._kv_norm = _norm(scope, spec, names.kv_a_norm, spec.rank)
        self._q_norm, self._queries = None, None
        if spec.q_rank is not None:
            self._q_norm = _norm(scope, spec, names.q_a_norm, spec.q_rank)
            q_b = scope.part(names.q_b, queries.whole).keeping(queries)
            self._queries = scope.linear([q_b], spec.q_rank)
        self._to_latent = _head_linear(
            scope, spec, "keys", spec.head_dim, spec.plain_dim + spec.rope_dim, _keys
        )
        self._of_latent = _head_linear(scope, spec, "values", spec.head_width, spec.rank, _values)
        attended = heads.times(spec.head_width)
        self._output = scope.linear(
            [scope.part(names.output, hidden).of_inputs(attended, scope.share.own_leaves)],
            attended.count,
            biased=spec.biased,
        )
        self._attention = AttentionLayer(
            index=scope.layer,
            num_heads=heads.count,
            num_kv_heads=1,
            head_dim=spec.head_dim,
            value_dim=spec.rank,
            values_in_keys=True,
            rope=scope.ropes.index(spec.rope),
            rotary_dim=spec.rope_dim,
            rotary_first=spec.rank,
            interleaved=spec.interleaved,
            scale=spec.scale,
        )
        scope.attentions.append(self._attention)

    def __call__(self, ops: ForwardPass[ValueT], x: ValueT) -> ValueT:
        """See `Sublayer`."""
        latents = ops.linear(self._latents, x)
        q = ops.columns(latents, 0, self._first_width)
        if self._q_norm is not None and self._queries is not None:
            q = ops.linear(self._queries, ops.norm(q, self._q_norm))
        latent = ops.norm(ops.columns(latents, self._first_width, self._spec.rank), self._kv_norm)
        rotated = ops.columns(latents, self._first_width + self._spec.rank, self._spec.rope_dim)
        key = ops.join(latent, rotated)
        value = ops.columns(key, 0, self._spec.rank)
        attended = ops.attention(self._attention, ops.head_linear(self._to_latent, q), key, value)
        return ops.linear(self._output, ops.head_linear(self._of_latent, attended))


def _norm(scope: Scope, spec: LatentSpec, name: str, width: int) -> Norm:
    norm = scope.norm(spec.norm, name, width)
    assert norm is not None
    return norm


def _keys(spec: LatentSpec, both: torch.Tensor) -> torch.Tensor:
    """Return ``[rank + rope_dim, plain_dim + rope_dim]``: the key projection transposed, and an identity for the rotated part."""
    plain, rope = spec.plain_dim, spec.rope_dim
    matrix = torch.zeros(spec.rank + rope, plain + rope, dtype=both.dtype)
    matrix[: spec.rank, :plain] = both[:plain].t()
    matrix[spec.rank :, plain:] = torch.eye(rope, dtype=both.dtype)
    return matrix


def _values(spec: LatentSpec, both: torch.Tensor) -> torch.Tensor:
    """Return ``[head_width, rank]``: the value projection."""
    return both[spec.plain_dim :]


def _head_linear(
    scope: Scope,
    spec: LatentSpec,
    label: str,
    columns: int,
    depth: int,
    take: Callable[[LatentSpec, torch.Tensor], torch.Tensor],
) -> HeadLinear:
    """Declare a matrix per head from its rows of `Names.kv_b`: key rows first, then value rows."""
    name, heads = scope.name(scope.names.kv_b), scope.share.of(spec.num_heads)

    def matrix(tensors: Sequence[torch.Tensor], head: int) -> torch.Tensor:
        return take(spec, tensors[0].view(heads.whole, -1, spec.rank)[heads.begin + head])

    shape = (heads.whole * (spec.plain_dim + spec.head_width), spec.rank)
    piece = StackPiece((f"{name}.weight",), (shape,), 0, heads.count, 0, matrix)
    stack = StackShape(
        label=f"{name}: {label} by head{heads.label}",
        experts=heads.count,
        columns=columns,
        depth=depth,
        paired=False,
        weights=[piece],
        is_exact=True,
    )
    return HeadLinear(scope.setting.quantization, scope.weights, stack)
