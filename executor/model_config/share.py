"""What one of several ranks keeps of a model: heads or channels of mixers, columns of feed-forwards, some of the logits.

    rank 0 of 2    queries of heads 0..3, their keys and values ─ attention ─ their columns of the output layer ─╮
    rank 1 of 2    queries of heads 4..7, their keys and values ─ attention ─ their columns of the output layer ─┴─ sums

As in Shoeybi et al., "Megatron-LM", 2019, section 3. What comes before and behind (norms, residuals, the embedding) every rank
computes alike. Imports no torch: the numbers are needed before there is a model.
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
"""Rows of logits that a program has room for at least: prompt log-probabilities come so many at a time."""
LINK_DEPTH = 2
"""Steps that may be on their way from a stage to the next."""
SUM_BYTES = 4
"""Of a sum that ranks add: fp32."""
STAGING_BYTES = 4 << 20
"""Of an expert that is being copied: what goes from one rank to another at a time, in about a millisecond or two."""
CROSSING_BYTES = 64 << 20
"""Of blocks on their way elsewhere, or back, whose parts lie in several processes: or one, where it takes more."""
PARTIAL_BYTES = 16 << 20
"""Of what attention comes to over partitions of keys that ranks keep together: a quarter of a million tokens of 16 heads with 512
numbers in a value, a million of 128. A token for which no room is left is computed by heads."""
LINE_BYTES = 64
"""Rows of experts may lie so much farther apart than they are wide."""

StateT = TypeVar("StateT", MambaSpec, Mamba2Spec, ShortConvSpec, DeltaSpec)


@dataclass(frozen=True, slots=True)
class KeptRange:
    """Numbers ``[begin, end)`` of ``whole``."""

    begin: int
    end: int
    whole: int

    @property
    def count(self) -> int:
        """How many."""
        return self.end - self.begin

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self.count == self.whole

    @property
    def label(self) -> str:
        """Which they are, behind the name of what they are of; of all nothing."""
        return "" if self.is_all else f" {self.begin}-{self.end}"

    def times(self, width: int) -> KeptRange:
        """Return the same of things that are ``width`` numbers each."""
        return KeptRange(self.begin * width, self.end * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class BlockStripe:
    """Which blocks of KV memory are one process's of those that keep the memory together: every so-many-th."""

    size: int = 1
    index: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has the memory."""
        return self.size == 1


ALONE = BlockStripe()
"""That of a process whose KV memory is its own."""


@dataclass(frozen=True, slots=True)
class Share:
    """That of one rank."""

    rank: int = 0
    size: int = 1
    by_experts: bool = False
    """Whether of a layer of experts it keeps some whole ones, not some columns of each."""
    stage: int = 0
    """Which of the stages that have some of the layers each; ranks share those of one stage."""
    stages: int = 1
    layers: tuple[int, int] | None = None
    """Which layers the stage has, from the first to behind the last; None: all."""
    places: int = 0
    """Of each layer of experts: room for copies of such as other ranks keep."""
    leaves: int = 1
    """Of the tree in which sums over what ranks divide are added, whoever has them; 1: each rank's part is one."""
    context_size: int = 1
    """So many neighbours, whose queries meet the same KV head, keep its KV together: each some of its blocks."""

    @property
    def kv_copy(self) -> int:
        """Which of the KV memories of the stage's ranks is this one's."""
        return self.rank // self.context_size

    @property
    def turn(self) -> BlockStripe:
        """Which of its blocks this rank writes."""
        return BlockStripe(self.context_size, self.rank % self.context_size)

    @property
    def is_all(self) -> bool:
        """Whether there are no other ranks that compute the same layers."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether the stage begins with tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage ends with logits."""
        return self.stage == self.stages - 1

    def has_layer(self, index: int) -> bool:
        """Whether the stage has this layer."""
        return self.layers is None or self.layers[0] <= index < self.layers[1]

    @property
    def own_leaves(self) -> int:
        """How many of the leaves this rank has: neighbours that are a branch."""
        return max(1, self.leaves // self.size)

    @property
    def label(self) -> str:
        """Which of how many, in words; of all nothing."""
        experts = ", whole experts" if self.by_experts else ""
        words = [f"rank {self.rank} of {self.size}{experts}"] * (not self.is_all)
        words += [f"stage {self.stage} of {self.stages}"] * (self.stages > 1)
        words += [f"{self.leaves} leaves"] * (self.leaves > 1)
        words += [f"{self.context_size} ranks with one KV memory"] * (self.context_size > 1)
        return ", ".join(words)

    def of(self, count: int) -> KeptRange:
        """Return the rank's part of so many: neighbours, each rank as many as any other but for one."""
        return KeptRange(count * self.rank // self.size, count * (self.rank + 1) // self.size, count)

    def of_experts(self, count: int) -> KeptRange:
        """Return the experts that the rank keeps, or keeps some columns of."""
        return self.of(count) if self.by_experts else KeptRange(0, count, count)

    def of_experts_width(self, width: int) -> KeptRange:
        """Return which columns of them it keeps."""
        return KeptRange(0, width, width) if self.by_experts else self.of(width)

    def of_kv_heads(self, count: int) -> KeptRange:
        """Return the KV heads that the rank's queries meet: where there are fewer than ranks, several ranks keep the same one.

        So it is with groups of states, and heads of keys.
        """
        if count >= self.size:
            return self.of(count)
        head = count * self.rank // self.size
        return KeptRange(head, head + 1, count)

    def of_attention(self, spec: AttentionSpec) -> AttentionSpec:
        """Return what the rank computes of an attention."""
        heads = self.of(spec.num_heads)
        return replace(
            spec,
            num_heads=heads.count,
            num_kv_heads=self.of_kv_heads(spec.num_kv_heads).count,
            alibi=spec.alibi[heads.begin : heads.end],
        )

    def of_state(self, spec: StateT) -> StateT:
        """Return what the rank computes of a mixer with a state: some heads, or channels, and the groups that they are of."""
        return spec.with_part(*self._part_of(spec))

    def of_state_need(self, layer: LayerSpec) -> StateNeed | None:
        """Return what the rank keeps of every request."""
        spec = layer.state
        return None if spec is None else spec.with_part(*self._part_of(spec)).state_need

    def _part_of(self, spec: StateSpec) -> tuple[int, int]:
        divided = spec.divided
        return self.of(divided.count).count, self.of_kv_heads(divided.groups).count


WHOLE = Share()
"""That of a process that has no others beside it."""


def share_of(executor: ExecutorConfig, rank: int, spec: DecoderSpec | None = None) -> Share:
    """Return the share of a rank as configured, of all ranks of all stages. spec: says which layers its stage has."""
    size, stages = executor.tensor_parallel_size, executor.pipeline_parallel_size
    stage = rank // size
    layers = None if spec is None or stages == 1 else stage_layers(spec, stages)[stage]
    places = 0 if executor.eplb is None else executor.eplb.num_redundant_experts // size
    leaves, context_size = executor.sum_leaves, executor.decode_context_parallel_size
    by_experts = executor.expert_parallel
    return Share(rank % size, size, by_experts, stage, stages, layers, places, leaves, context_size)


def stage_layers(spec: DecoderSpec, stages: int) -> list[tuple[int, int]]:
    """Return the layers of each of so many stages, neighbours: as few numbers as can be in the largest, logits' among them."""
    hidden, count = spec.hidden_size, len(spec.layers)
    blocks = [[block for block in (layer.mixer, layer.mlp) if block is not None] for layer in spec.layers]
    sums = [0, *accumulate(sum(block.num_parameters(hidden) for block in layer) for layer in blocks)]
    sums[count] += spec.vocab_size * (spec.embedding_width or hidden)
    best = {0: (0, [0])}  # by how many layers stages have so far: the largest stage, and where each begins
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
    """Return how many numbers a token has of what all ranks add, at most."""
    states = (layer.state for layer in spec.layers)
    return max(
        spec.hidden_size,
        max((each.chosen_width for each in states if isinstance(each, MambaSpec)), default=0),
    )


def rotated_width(spec: DecoderSpec) -> int:
    """Return how many numbers a token has of rotations that depend on more than its position: cosines and sines."""
    return 2 * sum(rope.rotary_dim for rope in spec.ropes if rope.depends_on_length)


def gathered_width(spec: DecoderSpec, size: int) -> int:
    """Return how many numbers a token has of what is normed over so many ranks' columns, at most; 0 where nothing is."""
    return max((width for layer in spec.layers for width in _normed_over(layer, size)), default=0)


def chosen_bytes(spec: DecoderSpec, item_bytes: int) -> int:
    """Return the memory of the rows that a token's experts make in a layer, at most; 0 where there are none."""
    chosen = max(
        (each.mlp.routing.chosen for each in spec.layers if isinstance(each.mlp, ExpertsSpec)), default=0
    )
    return chosen * (spec.hidden_size * item_bytes + LINE_BYTES)


def queries_width(spec: DecoderSpec, share: Share) -> int:
    """Return how many numbers a token's queries have, at most, of all ranks that keep KV together."""
    attentions = (layer.attention for layer in spec.layers)
    each = (
        attention.num_heads // share.size * padded_head(attention.head_dim)
        for attention in attentions
        if attention is not None
    )
    return share.context_size * max(each, default=0)


def most_outputs(limits: SchedulerConfig) -> int:
    """Return how many rows of logits a step has at most."""
    return max(limits.max_num_seqs, MIN_OUTPUTS)


def results_depth(stages: int) -> int:
    """Return the steps whose logits may lie there until they are drawn from: a power of two."""
    return 1 << (stages - 1).bit_length()


def shared_bytes(
    spec: DecoderSpec,
    share: Share,
    step_tokens: int,
    max_num_seqs: int,
    item_bytes: int,
    logits_item_bytes: int,
) -> int:
    """Return the memory that all ranks of all stages share for what is of a model's size.

    At most, since pages are mapped when they are first used. share: of any rank; step_tokens: of a step, at most; item_bytes: of
    a number; logits_item_bytes: of a logit.
    """
    size, stages = share.size, share.stages
    tokens, outputs = max(step_tokens, max_num_seqs), max(max_num_seqs, MIN_OUTPUTS)
    hidden, rotated = (tokens * width * item_bytes for width in (spec.hidden_size, rotated_width(spec)))
    logits = outputs * spec.vocab_size * logits_item_bytes
    handed_on = 0
    if stages > 1:
        handed_on = (stages - 1) * LINK_DEPTH * (hidden + rotated) + results_depth(stages) * logits
    if size == 1:
        return handed_on
    read = hidden * stages if stages > 1 else 0
    rows = tokens * chosen_bytes(spec, item_bytes) if share.by_experts else 0
    rows += STAGING_BYTES if share.places else 0
    return handed_on + read + stages * (_shared_by_ranks(spec, share, tokens, item_bytes) + rows) + logits


def _shared_by_ranks(spec: DecoderSpec, share: Share, tokens: int, item_bytes: int) -> int:
    """Return what those of one stage share for sums, what is normed whole, rotations, and attention over KV kept together."""
    size = share.size
    copied = 2 * gathered_width(spec, size) + rotated_width(spec)
    a_token = 2 * size * sums_width(spec) * SUM_BYTES + copied * item_bytes
    if share.turn.is_alone:
        return tokens * a_token
    copies = size // share.context_size
    return tokens * (a_token + copies * queries_width(spec, share) * item_bytes) + copies * PARTIAL_BYTES


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
