"""What one of several ranks keeps of a model: some heads of every attention, some columns of every feed-forward, some logits.

    rank 0 of 2    queries of heads 0..3, their keys and values ─ attention ─ their columns of the output layer ─╮
    rank 1 of 2    queries of heads 4..7, their keys and values ─ attention ─ their columns of the output layer ─┴─ sums

As in Shoeybi et al., "Megatron-LM", 2019, section 3. What comes before and behind (norms, residuals, the embedding) every rank
computes alike. Imports no torch: the numbers are needed before there is a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd

from quintet.executor.cards.experts import ExpertsSpec
from quintet.executor.cards.spec import AttentionSpec, DecoderSpec, LatentSpec, LayerSpec, MlpSpec, QkNormOver
from quintet.wire.config import ExecutorConfig, SchedulerConfig
from quintet.wire.kv_spec import padded_head

MOST_RANKS = 64
MOST_LEAVES = 8
"""``kMostLeaves`` of ``csrc/cpu/linear.hpp``."""
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


@dataclass(frozen=True, slots=True)
class Kept:
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

    def times(self, width: int) -> Kept:
        """Return the same of things that are ``width`` numbers each."""
        return Kept(self.begin * width, self.end * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class Turn:
    """Which blocks of KV memory are one process's of those that keep the memory together: every so-many-th."""

    size: int = 1
    index: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has the memory."""
        return self.size == 1


ALONE = Turn()
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
    def turn(self) -> Turn:
        """Which of its blocks this rank writes."""
        return Turn(self.context_size, self.rank % self.context_size)

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

    def of(self, count: int) -> Kept:
        """Return the rank's part of so many: neighbours, each rank as many as any other but for one."""
        return Kept(count * self.rank // self.size, count * (self.rank + 1) // self.size, count)

    def of_experts(self, count: int) -> Kept:
        """Return the experts that the rank keeps, or keeps some columns of."""
        return self.of(count) if self.by_experts else Kept(0, count, count)

    def of_experts_width(self, width: int) -> Kept:
        """Return which columns of them it keeps."""
        return Kept(0, width, width) if self.by_experts else self.of(width)

    def of_kv_heads(self, count: int) -> Kept:
        """Return the KV heads that the rank's queries meet: where there are fewer than ranks, several ranks keep the same one."""
        if count >= self.size:
            return self.of(count)
        head = count * self.rank // self.size
        return Kept(head, head + 1, count)

    def of_attention(self, spec: AttentionSpec) -> AttentionSpec:
        """Return what the rank computes of an attention."""
        heads = self.of(spec.num_heads)
        return replace(
            spec,
            num_heads=heads.count,
            num_kv_heads=self.of_kv_heads(spec.num_kv_heads).count,
            alibi=spec.alibi[heads.begin : heads.end],
        )


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


def misfit(spec: DecoderSpec, share: Share) -> str | None:
    """Return what keeps ranks from having such shares of a model, in a few words; None if nothing does."""
    return next((words for layer in spec.layers if (words := _misfit_of(layer, share)) is not None), None)


def why_not(spec: DecoderSpec, *, by_experts: bool) -> str | None:
    """Return why a model can be shared by no number of ranks; None if by some."""
    return next((words for layer in spec.layers if (words := _kind_of(layer, by_experts)) is not None), None)


def sizes_that_fit(spec: DecoderSpec, *, by_experts: bool) -> list[int]:
    """Return how many ranks can share a model, from 2 on."""
    shares = (Share(0, size, by_experts) for size in range(2, MOST_RANKS + 1))
    return [share.size for share in shares if misfit(spec, share) is None]


def context_sizes_that_fit(spec: DecoderSpec, size: int) -> list[int]:
    """Return by how many of so many ranks one KV memory can be kept, from 2 on: those whose queries meet the same KV head."""
    mixers = (layer.mixer for layer in spec.layers)
    heads = [each.num_kv_heads for each in mixers if isinstance(each, AttentionSpec | LatentSpec)]
    alike = gcd(*(size // count if count < size else 1 for count in heads))
    return [fitting for fitting in range(2, alike + 1) if alike % fitting == 0]


def leaves_of(spec: DecoderSpec) -> int:
    """Return the leaves that make bits those of any number of ranks: the most of 8, 4 and 2 ranks that can share it, or 1.

    Ranks then have whole experts: a sum over columns of each would be another one.
    """
    by_experts = has_experts(spec)
    if why_not(spec, by_experts=by_experts) is not None:
        return 1
    fitting = {1, *sizes_that_fit(spec, by_experts=by_experts)}
    return max(leaves for leaves in (1, 2, 4, MOST_LEAVES) if leaves in fitting)


def has_experts(spec: DecoderSpec) -> bool:
    """Whether some layer has experts."""
    return any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers)


def gathered_width(spec: DecoderSpec) -> int:
    """Return how many numbers a token has of what is normed over all ranks' columns, at most; 0 where nothing is."""
    return max((width for layer in spec.layers for width in _normed_over(layer)), default=0)


def chosen_bytes(spec: DecoderSpec, item_bytes: int) -> int:
    """Return the memory of the rows that a token's experts make in a layer, at most; 0 where there are none."""
    chosen = max(
        (each.mlp.routing.chosen for each in spec.layers if isinstance(each.mlp, ExpertsSpec)), default=0
    )
    return chosen * (spec.hidden_size * item_bytes + LINE_BYTES)


def queries_width(spec: DecoderSpec, share: Share) -> int:
    """Return how many numbers a token's queries have, at most, of all ranks that keep KV together."""
    mixers = (layer.mixer for layer in spec.layers)
    each = (
        mixer.num_heads // share.size * padded_head(mixer.head_dim)
        for mixer in mixers
        if isinstance(mixer, AttentionSpec | LatentSpec)
    )
    return share.context_size * max(each, default=0)


def most_outputs(limits: SchedulerConfig) -> int:
    """Return how many rows of logits a step has at most."""
    return max(limits.max_num_seqs, MIN_OUTPUTS)


def results_depth(stages: int) -> int:
    """Return the steps whose logits may lie there until they are drawn from: a power of two."""
    return 1 << (stages - 1).bit_length()


def shared_bytes(
    spec: DecoderSpec, share: Share, step_tokens: int, max_num_seqs: int, item_bytes: int
) -> int:
    """Return the memory that all ranks of all stages share for what is of a model's size.

    At most, since pages are mapped when they are first used. share: of any rank; step_tokens: of a step, at most; item_bytes: of
    a number.
    """
    size, stages = share.size, share.stages
    tokens, outputs = max(step_tokens, max_num_seqs), max(max_num_seqs, MIN_OUTPUTS)
    hidden, logits = tokens * spec.hidden_size * item_bytes, outputs * spec.vocab_size * item_bytes
    handed_on = (stages - 1) * LINK_DEPTH * hidden + results_depth(stages) * logits if stages > 1 else 0
    if size == 1:
        return handed_on
    read = hidden * stages if stages > 1 else 0
    rows = tokens * chosen_bytes(spec, item_bytes) if share.by_experts else 0
    rows += STAGING_BYTES if share.places else 0
    return handed_on + read + stages * (_shared_by_ranks(spec, share, tokens, item_bytes) + rows) + logits


def _shared_by_ranks(spec: DecoderSpec, share: Share, tokens: int, item_bytes: int) -> int:
    """Return what those of one stage share for sums, what is normed whole, rotations, and attention over KV kept together."""
    size = share.size
    rotated = sum(rope.rotary_dim for rope in spec.ropes if rope.depends_on_length)
    a_token = 2 * size * spec.hidden_size * SUM_BYTES + 2 * (gathered_width(spec) + rotated) * item_bytes
    if share.turn.is_alone:
        return tokens * a_token
    copies = size // share.context_size
    return tokens * (a_token + copies * queries_width(spec, share) * item_bytes) + copies * PARTIAL_BYTES


def _normed_over(layer: LayerSpec) -> Iterator[int]:
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionSpec):
        if mixer.qk_norm is not None and mixer.qk_norm_over is QkNormOver.WHOLE:
            yield mixer.num_heads * mixer.head_dim
        if mixer.attended_norm is not None:
            yield mixer.num_heads * mixer.value_dim
    if isinstance(mlp, MlpSpec) and mlp.down_norm is not None:
        yield mlp.width


def share_in_words(spec: DecoderSpec, share: Share) -> list[str]:
    """Say what a rank has, where ranks can share the model: kinds of layers in the order in which they come."""
    size, said = share.size, []
    for layer in spec.layers:
        if isinstance(layer.mixer, AttentionSpec):
            heads, kv_heads = layer.mixer.num_heads, layer.mixer.num_kv_heads
            mine = share.of_kv_heads(kv_heads).count
            said.append(f"{heads // size} of {heads} heads with {mine} of {kv_heads} KV heads")
        if isinstance(layer.mixer, LatentSpec):
            said.append(f"{layer.mixer.num_heads // size} of {layer.mixer.num_heads} heads over all latents")
        if isinstance(layer.mlp, MlpSpec):
            said.append(f"{layer.mlp.width // size} of {layer.mlp.width} columns of feed-forwards")
        if isinstance(layer.mlp, ExpertsSpec):
            count, wide = layer.mlp.routing.experts, layer.mlp.width
            of_each = f"{wide // size} of {wide} columns of each of {count} experts"
            whole = f"{share.of_experts(count).count} of {count} experts"
            whole += f" and room for copies of {share.places}" if share.places else ""
            said.append(whole if share.by_experts else of_each)
    return [*dict.fromkeys(said), f"{-(-spec.vocab_size // size)} of {spec.vocab_size} logits"]


def _kind_of(layer: LayerSpec, by_experts: bool) -> str | None:
    mixer, mlp = layer.mixer, layer.mlp
    if mixer is not None and not isinstance(mixer, AttentionSpec | LatentSpec):
        return f"layers of the kind {type(mixer).__name__.removesuffix('Spec')} are not divided yet"
    if isinstance(mlp, ExpertsSpec) and mlp.biased and not by_experts:
        return "columns of experts with biases are not divided, but whole experts are: add --enable-expert-parallel, or"
    return None


def _misfit_of(layer: LayerSpec, share: Share) -> str | None:
    mixer, mlp, size = layer.mixer, layer.mlp, share.size
    if isinstance(mixer, AttentionSpec | LatentSpec):
        heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
        if heads % size:
            return f"{heads} heads"
        if kv_heads % size and size % kv_heads:
            return f"{kv_heads} KV heads"
    if isinstance(mlp, ExpertsSpec):
        if share.by_experts and mlp.routing.experts < size:
            return f"{mlp.routing.experts} experts"
        widths = (0 if share.by_experts else mlp.width, mlp.shared_width or 0)
        wide = next((wide for wide in widths if wide % size), None)
        return None if wide is None else f"experts {wide} wide"
    if mlp is not None and mlp.width % size:
        return f"feed-forwards {mlp.width} wide"
    return None
