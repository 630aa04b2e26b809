"""Runs a model of transformers on the compiled CPU kernels: attention, and plain linear layers.

The weights of linear layers are packed like those of our layers; the module keeps a placeholder of the same shape without memory.
Code that reads such a weight directly would compute wrong results. The self-check detects that: it compares with logits from
before packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from quintet.executor.backends.cpu.ops.host_attention import PagedKv, attend, write_kv
from quintet.executor.backends.cpu.ops.host_linear import LinearLibrary, linear_library
from quintet.executor.backends.cpu.ops.linear import linear as multiply
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.checkpoints.quant.packed_formats import FLOAT_FORMATS
from quintet.executor.kv_memory import KvMemory
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables
from quintet.process.spans import TraceSpan, no_span
from quintet.wire.config import SchedulerConfig

MAX_OUTPUTS = 256


class HostRunner:
    """A `Runner`: a model, its KV memory in the kernels' layout, and the hidden states of the last step."""

    max_outputs = MAX_OUTPUTS

    def __init__(
        self,
        library: ProgramLibrary,
        model: TransformersModel,
        kv: KvMemory,
        limits: SchedulerConfig,
        span: TraceSpan = no_span,
    ) -> None:
        """Raises ConfigError if the kernels do not support the layers' heads or the block size."""
        self._span = span
        self._model = model
        self._step = Step(
            library, max(limits.max_num_batched_tokens, limits.max_num_seqs), limits.max_num_seqs
        )
        self._kv = [PagedKv.of_layer(kv, layer) for layer in model.attentions]
        self._hidden = torch.empty(0)
        self.token_ids = torch.from_numpy(self._step.columns["token_ids"])
        self.positions = torch.from_numpy(self._step.columns["positions"])
        self.work_done = 0
        """Total number of attention calls."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return self._model.read_bytes

    @torch.inference_mode()
    def forward(self, rows: Rows, tables: SlotTables) -> None:
        self._step.fill(rows, tables)
        count, columns = self._step.c.num_tokens, self._step.columns
        self.token_ids = torch.from_numpy(columns["token_ids"])[:count]
        self.positions = torch.from_numpy(columns["positions"])[:count]
        self._span("arrays")
        self._hidden = self._model.forward(self)

    def attention(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self.work_done += 1
        step, kv = self._step.c, self._kv[layer.index]
        return attend(step, layer, write_kv(step, layer, q, k, v, kv), kv)

    @torch.inference_mode()
    def logits(self, tokens: Int) -> torch.Tensor:
        return self._model.logits(self, self.normed(tokens))

    @torch.inference_mode()
    def normed(self, tokens: Int) -> torch.Tensor:
        """See `quintet.executor.pooling.HiddenSource`. The last hidden states of transformers' models are normed."""
        hidden = self._hidden
        return hidden if len(tokens) == len(hidden) else hidden[torch.from_numpy(tokens)]

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> None:
        """See `Runner.forward_and_draw`; not supported."""


def pack_linears(model: PreTrainedModel, dtype: torch.dtype, logits_dtype: torch.dtype) -> int:
    """Make the compiled kernels compute every plain linear layer; return the number of such layers.

    logits_dtype: result dtype of the output layer.
    """
    library = linear_library()
    if library is None:
        return 0
    embeddings = {id(table.weight) for table in model.modules() if isinstance(table, torch.nn.Embedding)}
    head, count = model.get_output_embeddings(), 0
    for linear in _plain_linears(model):
        if linear.weight.dtype is dtype and (linear.bias is None or linear.bias.dtype is dtype):
            result_dtype = logits_dtype if linear is head else dtype
            _pack(library, linear, id(linear.weight) in embeddings, result_dtype)
            count += 1
    return count


def keep_logit_sums(model: PreTrainedModel) -> None:
    """Make the output layer return float32, if it is a plain linear layer computed by torch."""
    head = model.get_output_embeddings()
    if any(linear is head for linear in _plain_linears(model)):

        def forward(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            logits = multiply(rows, head.weight, head.bias, result_dtype=torch.float32)
            return logits.view(*x.shape[:-1], -1)

        vars(head)["forward"] = forward


def _plain_linears(model: PreTrainedModel) -> Iterator[torch.nn.Linear]:
    """Yield exact instances of `torch.nn.Linear` without a replaced ``forward``."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and "forward" not in vars(module):
            yield module


def _pack(library: LinearLibrary, linear: torch.nn.Linear, is_tied: bool, result_dtype: torch.dtype) -> None:
    weight = linear.weight.detach()
    columns, depth = weight.shape
    packed = PackedWeight(library, FLOAT_FORMATS[weight.dtype], columns, depth)
    packed.fill(weight)
    vars(linear)["forward"] = _forward(packed, linear.bias, result_dtype)
    if not is_tied:
        placeholder = torch.empty((1, 1), dtype=weight.dtype).expand(columns, depth)
        linear.weight = torch.nn.Parameter(placeholder, requires_grad=False)


def _forward(
    packed: PackedWeight, bias: torch.Tensor | None, result_dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, packed.depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return packed.linear(rows, bias, result_dtype=result_dtype).view(*x.shape[:-1], packed.columns)

    return forward
