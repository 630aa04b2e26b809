"""Runs a model operation by operation with torch: on a GPU, and on a CPU without the compiled kernels.

A `quintet.executor.runner.Runner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quintet.executor.batch import Batch, BatchBuilder, Int, KvShape, Rows
from quintet.executor.layers.experts import Experts
from quintet.executor.layers.linear import Embedding, Linear
from quintet.executor.layers.norm import Norm
from quintet.executor.memory import lazy_zeros, to_device
from quintet.executor.models.forward import AttentionLayer
from quintet.executor.models.model import CausalModel
from quintet.executor.ops.paged_attention import paged_attention
from quintet.executor.ops.rope_kv_write import rope_kv_write
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import SlotTables
from quintet.process.trace import Span, no_span
from quintet.wire.kv_spec import KvSpec

MAX_OUTPUTS = 256


class EagerPass:
    """A `quintet.executor.models.forward.ForwardPass` over tensors: the pass of one step."""

    def __init__(
        self, batch: Batch, kv: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """kv: of each layer ``[2, num_blocks, num_kv_heads, block_size, head_dim]``; cos, sin: see `Rope.cos_sin`."""
        self._batch = batch
        self._kv = kv
        self._cos = cos
        self._sin = sin
        self.num_done = 0
        """Operations that were begun: the one before them is done, or handed to a device."""

    def embedding(self, layer: Embedding) -> torch.Tensor:
        """See `ForwardPass`."""
        self.num_done += 1
        return layer(self._batch.token_ids)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `ForwardPass`."""
        self.num_done += 1
        return norm(x)

    def linear(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `ForwardPass`."""
        self.num_done += 1
        return layer(x)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `ForwardPass`."""
        self.num_done += 1
        return x + y

    def columns(self, x: torch.Tensor, begin: int, width: int) -> torch.Tensor:
        """See `ForwardPass`."""
        return x.narrow(1, begin, width)

    def experts(self, layer: Experts, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `ForwardPass`."""
        self.num_done += 1
        return layer(x, scores)

    def attention(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See `ForwardPass`."""
        self.num_done += 1
        batch, cache = self._batch, self._kv[layer.index]
        q = q if layer.q_norm is None else layer.q_norm(q)
        k = k if layer.k_norm is None else layer.k_norm(k)
        q, k, v = (x.unflatten(1, (-1, layer.head_dim)) for x in (q, k, v))
        q = rope_kv_write(q, k, v, self._cos, self._sin, cache, batch.kv_write)
        attended = paged_attention(q, cache, batch.attention[layer.window], layer.scale)
        return attended.reshape(batch.num_tokens, -1)


class EagerRunner:
    """A model, its KV memory as plain tensors, and the hidden states of the last step."""

    max_outputs = MAX_OUTPUTS

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        dtype: torch.dtype,
        kv: KvSpec,
        num_blocks: int,
        span: Span = no_span,
    ) -> None:
        self._span = span
        self._model = model
        self._device = device
        self._dtype = dtype
        shape = (2, num_blocks, kv.num_kv_heads, kv.block_size, kv.head_dim)
        self._kv = [lazy_zeros(shape, dtype, device) for _ in range(kv.num_layers)]
        element_bytes = torch.empty((), dtype=dtype).element_size()
        self._builder = BatchBuilder(
            KvShape(kv.num_kv_heads, kv.block_size, 2 * kv.num_kv_heads * kv.head_dim * element_bytes),
            model.windows,
            model.num_heads,
            model.rope.spec.depends_on_length,
            dtype,
        )
        self._pass: EagerPass | None = None
        self._hidden = torch.empty(0)
        self._done_before = 0

    @property
    def work_done(self) -> int:
        """Operations computed so far."""
        current = self._pass
        return self._done_before + (0 if current is None else current.num_done)

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """See `Runner.blocks`."""
        return [cache.transpose(0, 1) for cache in self._kv]

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        """See `Runner.forward`."""
        batch = self._builder.build(rows, tables)
        cos, sin = self._model.rope.cos_sin(batch.positions, batch.lengths, self._dtype)
        self._span("arrays")
        self._done_before = self.work_done
        self._pass = EagerPass(batch, self._kv, cos, sin)
        self._hidden = self._model.forward(self._pass)

    def logits(self, tokens: Int) -> torch.Tensor:
        """See `Runner.logits`."""
        assert self._pass is not None, "no step has run"
        hidden = self._hidden
        if len(tokens) < len(hidden):
            hidden = hidden[to_device(tokens, self._device)]
        return self._model.logits(self._pass, hidden)

    def forward_and_draw(self, rows: Rows, tables: SlotTables, settings: Settings) -> None:
        """See `Runner.forward_and_draw`: one operation at a time is all it can."""

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `Runner.copy_blocks`."""
        for cache in self._kv:
            cache[:, targets] = cache[:, sources]
