"""One rank's share of a model: heads or channels of mixers, columns of feed-forward layers, a range of the logits.

    rank 0 of 2    queries, keys and values of heads 0..3 ─ attention ─ their columns of the output layer ─╮
    rank 1 of 2    queries, keys and values of heads 4..7 ─ attention ─ their columns of the output layer ─┴─ sum

The division follows Shoeybi et al., "Megatron-LM", 2019, section 3. Every rank computes the rest in full: norms,
residuals and the embedding. Imports no torch: `deploy` needs these numbers before a model exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    QkNormOver,
    StateSpec,
)
from quintet.executor.model_config.state_specs import (
    DeltaSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateNeed,
)
from quintet.wire.config import ExecutorConfig, SchedulerConfig
from quintet.wire.kv_spec import padded_head

MIN_OUTPUTS = 256
"""Minimum rows of logits in a program: the batch size of prompt log-probabilities."""
LINK_DEPTH = 2
"""Steps in flight between two pipeline stages."""
SUM_BYTES = 4
"""Bytes of one element of a sum over ranks: fp32."""
STAGING_BYTES = 4 << 20
"""Buffer size of an expert copy: one transfer between ranks, about 1 to 2 ms."""
KV_GATHER_BYTES = 64 << 20
"""Buffer size for blocks with parts in several processes; at least one block."""
PARTIAL_BYTES = 16 << 20
"""Buffer size of partial attention results over shared KV.

It fits 250,000 tokens of 16 heads with 512 elements per value, or 1,000,000 with 128. Tokens that
exceed the buffer are computed head by head.
"""
LINE_BYTES = 64
"""Maximum padding of an expert row, in bytes."""

StateT = TypeVar("StateT", MambaSpec, Mamba2Spec, ShortConvSpec, DeltaSpec)


@dataclass(frozen=True, slots=True)
class KeptRange:
    """The range ``[begin, end)`` of ``whole`` elements."""

    begin: int
    end: int
    whole: int

    @property
    def count(self) -> int:
        """Number of elements in the range."""
        return self.end - self.begin

    @property
    def is_all(self) -> bool:
        """True if the range is the whole."""
        return self.count == self.whole

    @property
    def label(self) -> str:
        """The range as a suffix for a name; empty for the whole."""
        return "" if self.is_all else f" {self.begin}-{self.end}"

    def times(self, width: int) -> KeptRange:
        """Return the range scaled to items of ``width`` elements."""
        return KeptRange(self.begin * width, self.end * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class BlockStripe:
    """One process's blocks of a shared KV memory: every ``size``-th block from ``index``."""

    size: int = 1
    index: int = 0

    @property
    def is_alone(self) -> bool:
        """True if the process does not share its KV memory."""
        return self.size == 1


ALONE = BlockStripe()
"""The stripe of a process with its own KV memory."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one rank."""

    rank: int = 0
    size: int = 1
    by_experts: bool = False
    """True if the rank keeps whole experts, instead of some columns of each."""
    stage: int = 0
    """Index of the pipeline stage; the ranks of a stage share its layers."""
    stages: int = 1
    layers: tuple[int, int] | None = None
    """Layers ``[begin, end)`` of the stage; None: all."""
    places: int = 0
    """Slots per layer for copies of other ranks' experts."""
    leaves: int = 1
    """Leaves of the summation tree over divided results, for any number of ranks; 1: one leaf per rank."""
    context_size: int = 1
    """Number of consecutive ranks with the same KV head that share KV memory; each keeps some of its blocks."""
    has_adapters: bool = False
    """For sizes of memory: True if LoRA adapters read gathered inputs."""

    @property
    def kv_copy(self) -> int:
        """Index of this rank's KV memory in its stage."""
        return self.rank // self.context_size

    @property
    def stripe(self) -> BlockStripe:
        """The blocks that this rank writes."""
        return BlockStripe(self.context_size, self.rank % self.context_size)

    @property
    def is_all(self) -> bool:
        """True if this rank computes its layers alone."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """True if the stage starts from token ids."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if the stage computes logits."""
        return self.stage == self.stages - 1

    def has_layer(self, index: int) -> bool:
        """Return whether the stage has this layer."""
        return self.layers is None or self.layers[0] <= index < self.layers[1]

    @property
    def own_leaves(self) -> int:
        """Number of consecutive leaves that this rank computes."""
        return max(1, self.leaves // self.size)

    @property
    def label(self) -> str:
        """Describe rank, stage and division in words; empty for a whole model."""
        experts = ", whole experts" if self.by_experts else ""
        words = [f"rank {self.rank} of {self.size}{experts}"] * (not self.is_all)
        words += [f"stage {self.stage} of {self.stages}"] * (self.stages > 1)
        words += ["without layers"] * (self.layers == (0, 0))
        words += [f"{self.leaves} leaves"] * (self.leaves > 1)
        words += [f"{self.context_size} ranks with one KV memory"] * (self.context_size > 1)
        return ", ".join(words)

    def of(self, count: int) -> KeptRange:
        """Return the rank's range of ``count`` items; the sizes of two ranks' ranges differ by at most one."""
        return KeptRange(count * self.rank // self.size, count * (self.rank + 1) // self.size, count)

    def of_experts(self, count: int) -> KeptRange:
        """Return the experts of which the rank keeps all or some columns."""
        return self.of(count) if self.by_experts else KeptRange(0, count, count)

    def of_experts_width(self, width: int) -> KeptRange:
        """Return the columns of each expert that the rank keeps."""
        return KeptRange(0, width, width) if self.by_experts else self.of(width)

    def of_kv_heads(self, count: int) -> KeptRange:
        """Return the KV heads of the rank's queries. With fewer KV heads than ranks, several ranks keep the same head.

        The same rule applies to groups of states and to heads of keys.
        """
        if count >= self.size:
            return self.of(count)
        head = count * self.rank // self.size
        return KeptRange(head, head + 1, count)

    def of_attention(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the rank's part of an attention layer."""
        heads = self.of(spec.num_heads)
        return replace(
            spec,
            num_heads=heads.count,
            num_kv_heads=self.of_kv_heads(spec.num_kv_heads).count,
            alibi=spec.alibi[heads.begin : heads.end],
        )

    def of_state(self, spec: StateT) -> StateT:
        """Return the rank's part of a state mixer: some heads or channels, and their groups."""
        return spec.with_part(*self._part_of(spec))

    def of_state_need(self, layer: LayerSpec) -> StateNeed | None:
        """Return the state that the rank keeps per request; None without one."""
        spec = layer.state
        return None if spec is None else spec.with_part(*self._part_of(spec)).state_need

    def _part_of(self, spec: StateSpec) -> tuple[int, int]:
        divided = spec.divided
        return self.of(divided.count).count, self.of_kv_heads(divided.groups).count


WHOLE = Share()
"""The share of a process that holds the whole model."""
OUTPUT = Share(stage=1, stages=2, layers=(0, 0))
"""The part after the layers, whole: a draft head on rank 0 computes all logits."""


def share_of(executor: ExecutorConfig, rank: int, spec: DecoderSpec | None = None) -> Share:
    """Return the configured share of a rank, numbered over all stages. spec: determines the stage's layers."""
    size, stages = executor.tensor_parallel_size, executor.pipeline_parallel_size
    stage = rank // size
    layers = None if spec is None or stages == 1 else stage_layers(spec, stages)[stage]
    places = 0 if executor.eplb is None else executor.eplb.num_redundant_experts // size
    leaves, context_size = executor.sum_leaves, executor.decode_context_parallel_size
    by_experts = executor.expert_parallel
    return Share(rank % size, size, by_experts, stage, stages, layers, places, leaves, context_size)


def stage_layers(spec: DecoderSpec, stages: int) -> list[tuple[int, int]]:
    """Return the layers of each stage: consecutive, with the smallest possible largest stage, logits included."""
    hidden, count = spec.hidden_size, len(spec.layers)
    sums = [0, *accumulate(layer.num_parameters(hidden) for layer in spec.layers)]
    sums[count] += spec.vocab_size * (spec.embedding_width or hidden)
    best = {
        0: (0, [0])
    }  # by number of layers assigned so far: size of the largest stage, first layer of each stage
    for _ in range(stages):
        best = {
            end: min(
                (max(largest, sums[end] - sums[begin]), [*begins, end])
                for begin, (largest, begins) in best.items()
                if begin < end
            )
            for end in range(min(best) + 1, count + 1)
        }
    return list(pairwise(best[count][1]))


def sums_width(spec: DecoderSpec) -> int:
    """Return the maximum width of a sum over ranks, in elements per token."""
    states = (layer.state for layer in spec.layers)
    return max(
        spec.hidden_size,
        max((each.chosen_width for each in states if isinstance(each, MambaSpec)), default=0),
    )


def rotated_width(spec: DecoderSpec) -> int:
    """Return the elements per token of length-dependent rotations: cosines and sines."""
    return 2 * sum(rope.rotary_dim for rope in spec.ropes if rope.depends_on_length)


def gathered_width(spec: DecoderSpec, size: int, *, has_adapters: bool) -> int:
    """Return the maximum width of values gathered from all ranks, in elements per token; 0 without one.

    Norms over all columns read them, and adapters of layers with divided inputs.
    """
    normed = (width for layer in spec.layers for width in _normed_over(layer, size))
    divided = (width for layer in spec.layers if has_adapters for width in _divided_inputs(layer))
    return max((*normed, *divided), default=0)


def chosen_bytes(spec: DecoderSpec, item_bytes: int) -> int:
    """Return the maximum bytes per token of the chosen experts' output rows in a layer; 0 without experts."""
    chosen = max(
        (each.mlp.routing.chosen for each in spec.layers if isinstance(each.mlp, ExpertsSpec)), default=0
    )
    return chosen * (spec.hidden_size * item_bytes + LINE_BYTES)


def queries_width(spec: DecoderSpec, share: Share) -> int:
    """Return the maximum width of a token's queries over all ranks that share KV memory, in elements."""
    attentions = (layer.attention for layer in spec.layers)
    each = (
        attention.num_heads // share.size * padded_head(attention.head_dim)
        for attention in attentions
        if attention is not None
    )
    return share.context_size * max(each, default=0)


def most_outputs(limits: SchedulerConfig) -> int:
    """Return the maximum rows of logits in a step."""
    return max(limits.max_num_seqs, MIN_OUTPUTS)


def aux_layers_of(limits: SchedulerConfig) -> list[int]:
    """Return the numbers of layers after which a draft head reads hidden states; none without a head."""
    draft = None if limits.speculative is None else limits.speculative.draft
    return [] if draft is None else draft.aux_layers


def results_depth(stages: int) -> int:
    """Return the number of steps with logits buffered until sampling: a power of two."""
    return 1 << (stages - 1).bit_length()


def shared_bytes(
    spec: DecoderSpec,
    share: Share,
    step_tokens: int,
    max_num_seqs: int,
    item_bytes: int,
    logits_item_bytes: int,
    num_observed: int = 0,
) -> int:
    """Return an upper bound on the shared memory of all ranks and stages; pages are mapped on first use.

    share: of any rank. step_tokens: maximum tokens of a step. item_bytes: bytes of an activation element;
    logits_item_bytes: of a logit. num_observed: hidden states per token that a draft head reads.
    """
    size, stages = share.size, share.stages
    tokens, outputs = max(step_tokens, max_num_seqs), max(max_num_seqs, MIN_OUTPUTS)
    hidden, rotated = (tokens * width * item_bytes for width in (spec.hidden_size, rotated_width(spec)))
    logits = outputs * spec.vocab_size * logits_item_bytes
    link_bytes = 0
    if stages > 1:
        observed = num_observed * hidden
        link_bytes = (stages - 1) * LINK_DEPTH * (hidden + rotated + observed)
        link_bytes += results_depth(stages) * (logits + observed)
    if size == 1:
        return link_bytes
    read = hidden * stages if stages > 1 else 0
    rows = tokens * chosen_bytes(spec, item_bytes) if share.by_experts else 0
    rows += STAGING_BYTES if share.places else 0
    return link_bytes + read + stages * (_shared_by_ranks(spec, share, tokens, item_bytes) + rows) + logits


def _shared_by_ranks(spec: DecoderSpec, share: Share, tokens: int, item_bytes: int) -> int:
    """Return the shared bytes of one stage for sums, gathered norms, rotations and attention over shared KV."""
    size = share.size
    copied = 2 * gathered_width(spec, size, has_adapters=share.has_adapters) + rotated_width(spec)
    token_bytes = 2 * size * sums_width(spec) * SUM_BYTES + copied * item_bytes
    if share.stripe.is_alone:
        return tokens * token_bytes
    copies = size // share.context_size
    return tokens * (token_bytes + copies * queries_width(spec, share) * item_bytes) + copies * PARTIAL_BYTES


def _normed_over(layer: LayerSpec, size: int) -> Iterator[int]:
    attention, state, mlp = layer.attention, layer.state, layer.mlp
    if isinstance(attention, AttentionSpec):
        if attention.qk_norm is not None and attention.qk_norm_over is QkNormOver.WHOLE:
            yield attention.num_heads * attention.head_dim
        if attention.attended_norm is not None:
            yield attention.num_heads * attention.value_dim
    if isinstance(state, Mamba2Spec) and state.norm is not None and state.groups % size:
        yield state.channels
    if isinstance(mlp, MlpSpec) and mlp.down_norm is not None:
        yield mlp.width


def _divided_inputs(layer: LayerSpec) -> Iterator[int]:
    """Yield the input widths of layers that ranks divide by inputs, over all ranks."""
    attention, state, mlp = layer.attention, layer.state, layer.mlp
    if attention is not None:
        width = attention.value_dim if isinstance(attention, AttentionSpec) else attention.head_width
        yield attention.num_heads * width
    if state is not None:
        yield state.channels
    if mlp is not None:
        yield mlp.width if isinstance(mlp, MlpSpec) else mlp.shared_width or 0
