"""Random traces of core operations and the invariants that hold afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quintet.core.kv.prefetch import FETCH_TIMEOUT_NS
from quintet.wire import codec
from quintet.wire.config import SpeculativeConfig
from quintet.wire.errors import ErrorCode
from quintet.wire.kv_spec import Kind, KvGroup
from quintet.wire.messages import FinishReason
from quintet.wire.params import seed_of_choice
from quintet.wire.pooling import PoolingType
from quintet.wire.request import KvTransfer
from quintet.wire.step import NewRow
from tests.core.kv.fake_back_ends import PEER, FakeBackEnd, FakeDisk, FakePeers, FakeStore

from .fake import ExecutorFails, Fault, World, no_fault
from .fake_model import EOS, expected, vector_of

PLAIN = (KvGroup("full", [0]),)
RAISES, DIES, RAISES_LATER, DIES_DECODING = 250, 251, 252, 253
"""Prompt tokens that fail every executor. They lie beyond the vocabulary, so they are never sampled."""


def poison_of(prompt: list[int]) -> int | None:
    """Return the poison in a prompt."""
    return next((token for token in prompt if token >= RAISES), None)


def raise_poison(rows: list[tuple[NewRow, int, int]]) -> None:
    """Raise `ExecutorFails` for a poison prompt: at its position, after the third output, or in a later one-token decode."""
    for row, start, count in rows:
        num_prompt = row.num_prompt_tokens
        prompt = list(codec.unpack_i32(row.token_ids))[:num_prompt]
        poison = poison_of(prompt)
        if poison is None:
            continue
        place = prompt.index(poison) if poison in (RAISES, DIES) else num_prompt + 2
        decodes_on = poison == DIES_DECODING and count == 1 and start >= place
        if decodes_on or (poison != DIES_DECODING and start <= place < start + count):
            dies = poison in (DIES, DIES_DECODING)
            raise ExecutorFails(dies=dies, loses_results=dies and row.request_id % 2 == 0)


@dataclass
class Sent:
    """Request as sent, per choice."""

    prompt: list[int]
    seed: int
    max_tokens: int
    stops: tuple[int, ...]
    min_tokens: int
    silenced: bool = False
    cancelled: bool = False
    pooling: PoolingType | None = None


def random_groups(rng: random.Random) -> list[KvGroup]:
    """Make a model of up to four groups of layers; at least one is not full attention."""
    kinds: list[Kind] = rng.choices(["full", "sliding", "chunked", "state"], k=rng.randint(1, 4))
    if set(kinds) == {"full"}:
        kinds[-1] = "sliding"
    windows = [rng.choice([1, 3, 4, 8, 9, 17]) for _ in kinds]
    return [
        KvGroup(kind, [layer], window if kind in ("sliding", "chunked") else 0)
        for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True))
    ]


HANDOVERS = [
    None,
    KvTransfer(offers=True),
    *(KvTransfer(peer=PEER, num_blocks=count) for count in (0, 3, 1 << 30)),
]


def random_world(
    rng: random.Random,
    depth: int,
    fault: Fault = no_fault,
    num_host_blocks: int = 0,
    groups: Sequence[KvGroup] = PLAIN,
    stages: int = 1,
    disk: FakeDisk | None = None,
    peers: FakePeers | None = None,
    store: FakeStore | None = None,
    num_drafts: int = 0,
) -> World:
    """Make a world with few blocks, slots or a small budget; with host memory, few blocks."""
    num_blocks = rng.choice([12, 20, 40, 100])
    if len(groups) > 1:
        num_blocks = max(num_blocks, 12 * len(groups))
    return World(
        groups=list(groups),
        disk=disk,
        peers=peers,
        store=store,
        fault=fault,
        max_steps_in_flight=depth,
        stages=stages,
        num_host_blocks=num_host_blocks,
        num_blocks=min(num_blocks, 16) if num_host_blocks else num_blocks,
        block_size=rng.choice([1, 2, 4, 8]),
        slots=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_model_len=rng.choice([24, 64]),
        policy=rng.choice(["fcfs", "priority", "longest", "latest"]),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        prefix_caching=rng.random() < 0.8 or peers is not None,
        enable_chunked_prefill=rng.random() < 0.8,
        step_target_ms=rng.choice([0, 0, 20]),
        speculative=SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None,
    )


def random_trace(
    seed: int,
    num_operations: int,
    depth: int,
    poisonous: float = 0.0,
    num_host_blocks: int = 0,
    *,
    in_groups: bool = False,
    stages: int = 1,
    disk: FakeDisk | None = None,
    peers: FakePeers | None = None,
    store: FakeStore | None = None,
    num_drafts: int = 0,
) -> tuple[World, dict[int, Sent]]:
    """Play a trace; return the world, idle again, and the sent requests.

    ``poisonous``: share of requests that make the executor fail. ``in_groups``: model with several kinds of layers.
    ``num_drafts``: maximum drafts per step, which the executor accepts in part.
    """
    rng = random.Random(seed)
    groups = random_groups(rng) if in_groups else PLAIN
    if poisonous and in_groups:
        groups = [*groups, *PLAIN]  # with windows alone, poison may never be computed
    fault = raise_poison if poisonous else no_fault
    world = random_world(rng, depth, fault, num_host_blocks, groups, stages, disk, peers, store, num_drafts)
    stems = [[rng.randrange(3, 200) for _ in range(40)] for _ in range(3)]
    sent: dict[int, Sent] = {}
    next_id = 1
    for _ in range(num_operations):
        alive = list(world.engine.state.live) if world.engine.state else []
        roll = rng.random()
        if roll < 0.18 and len(alive) < 24:
            next_id = _admit(world, rng, stems, sent, next_id, poisonous)
        elif roll < 0.21 and alive:
            _cancel(world, rng, sent, alive)
        elif roll < 0.23 and alive:
            request_id = rng.choice(alive)
            sent[request_id].silenced = True
            world.engine.stop_hit([request_id, 10**9], [world.sent[request_id].spec.attempt, 0], world.tick())
        elif roll < 0.234:
            if (
                world.engine.state is None or world.engine.state.trial is None
            ):  # a random kill could reject an innocent request
                world.new_executor()
        elif roll < 0.25:
            _lose_texts(world, rng, sent)
        elif roll < 0.253:
            world.new_core()
            for request_id in sent:
                _resend(world, rng, sent, request_id)
        elif roll < 0.6:
            world.plan()
        elif (place := peers or store) is not None and roll < 0.66:
            _answer_peers(world, rng, place)
        elif disk is not None and roll < 0.7:
            disk.act(rng, world.engine)
        else:
            world.commit()
    world.run()
    return world, sent


def _cancel(world: World, rng: random.Random, sent: dict[int, Sent], alive: list[int]) -> None:
    chosen = rng.sample(alive, min(len(alive), 2))
    for request_id in chosen:
        sent[request_id].cancelled = True
    world.cancel(*chosen, 10**9)


def _answer_peers(world: World, rng: random.Random, peers: FakeBackEnd) -> None:
    """Send the peers' answers, a few of them too late."""
    peers.act(rng, world.engine)
    if rng.random() < 0.05:
        world.now += FETCH_TIMEOUT_NS + 1
        world.apply(world.engine.expire(world.now))


def _lose_texts(world: World, rng: random.Random, sent: dict[int, Sent]) -> None:
    """Kill a detokenizer: some requests, ended or not, have outputs that their frontends have not seen."""
    for request_id in sent:
        if rng.random() < 0.3:
            _resend(world, rng, sent, request_id)


def _resend(world: World, rng: random.Random, sent: dict[int, Sent], request_id: int) -> None:
    """Resend a choice with some of its outputs, unless its frontend has seen its end or cancelled it."""
    outcome = world.outcomes.get(request_id)
    if sent[request_id].cancelled or sent[request_id].silenced or request_id in world.failed:
        return
    num_outputs = 0 if outcome is None else len(outcome.tokens)
    if outcome is not None and outcome.num_endings and rng.random() < 0.5:
        return
    world.resend(request_id, rng.randint(0, num_outputs))


def _admit(
    world: World,
    rng: random.Random,
    stems: list[list[int]],
    sent: dict[int, Sent],
    next_id: int,
    poisonous: float,
) -> int:
    state = world.engine.state
    assert state is not None
    longest = min(state.limits.max_request_len, state.limits.max_prompt or 10**9, 30) - 1
    longest = max(longest, 1)
    stem = rng.choice(stems)
    if not state.limits.groups.is_plain and sent and rng.random() < 0.3:
        before = rng.choice(list(sent))  # next turn of a chat
        stem = sent[before].prompt + (world.outcomes[before].tokens if before in world.outcomes else [])
        stem = [token for token in stem if token < RAISES] + stems[0][:5]
    prompt = stem[: rng.randint(1, longest)] + [rng.randrange(3, 200)] * rng.randint(0, 1)
    prompt = prompt[:longest]
    if poisonous and rng.random() < poisonous:
        prompt[rng.randrange(len(prompt))] = rng.choice([RAISES, DIES, RAISES_LATER, DIES_DECODING])
    if rng.random() < 0.15:
        kind = rng.choice([*PoolingType])
        if rng.random() < 0.2:  # as long as a request may be
            prompt = (prompt * 30)[: longest + 1]
        sent[next_id] = Sent(prompt, next_id, 1, (), 0, pooling=kind)
        reads_all = kind is PoolingType.MEAN
        salt, priority = rng.choice(["", "", "a"]), rng.randint(-1, 1)
        options: dict[str, object] = {"max_tokens": 1, "skip_reading_prefix_cache": reads_all}
        world.admit(next_id, prompt, pooling=kind, priority=priority, cache_salt=salt, **options)
        return next_id + 1
    n = rng.choice([1, 1, 1, 2, 4])
    max_tokens = rng.randint(1, 20)
    stop_token_ids = rng.sample(range(3, 200), rng.choice([0, 0, 12]))
    ignore_eos = rng.random() < 0.3
    min_tokens = rng.choice([0, 0, min(3, max_tokens)])
    stops = tuple(stop_token_ids) + (() if ignore_eos else (EOS,))
    limit = min(max_tokens, state.limits.max_request_len - len(prompt))
    for choice in range(n):
        sent[next_id + choice] = Sent(prompt, seed_of_choice(next_id, choice), limit, stops, min_tokens)
    resumed: list[int] = []
    if n == 1 and rng.random() < 0.2:
        whole = expected(prompt, next_id, limit, stops, min_tokens)
        resumed = whole[: rng.randrange(len(whole))]
    world.admit(
        next_id,
        prompt,
        n=n,
        output_ids=resumed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        priority=rng.randint(-1, 1),
        cache_salt=rng.choice(["", "", "a"]),
        skip_reading_prefix_cache=rng.random() < 0.1,
        kv_transfer=None if world.peers is None else rng.choice(HANDOVERS),
    )
    return next_id + n


def assert_served(world: World, sent: dict[int, Sent]) -> None:
    """Check that every request ended once, with the tokens that it has alone, unless it was poisonous."""
    world.assert_idle()
    assert all(poison_of(sent[request_id].prompt) for request_id in world.failed)
    assert set(world.codes.values()) <= {ErrorCode.UNPROCESSABLE}
    for request_id, request in sent.items():
        outcome = world.outcomes.get(request_id)
        if request_id in world.failed:
            continue
        if poison_of(request.prompt) in (RAISES, DIES):
            assert request.cancelled or request.silenced, request_id
        wanted = expected(request.prompt, request.seed, request.max_tokens, request.stops, request.min_tokens)
        if outcome is None:
            assert request.silenced, request_id
            continue
        if request.silenced:
            assert outcome.num_endings == 0
            assert outcome.tokens == wanted[: len(outcome.tokens)]
            continue
        assert outcome.num_endings == 1, request_id
        if request.pooling is not None:
            is_aborted = request.cancelled and outcome.finish is FinishReason.ABORT
            assert is_aborted or outcome.vector == vector_of(request.prompt), request_id
            assert not outcome.tokens
            continue
        if request.cancelled and outcome.finish is FinishReason.ABORT:
            assert outcome.tokens == wanted[: len(outcome.tokens)]
            continue
        assert outcome.tokens == wanted, request_id
        last = wanted[-1]
        stopped = last in request.stops and len(wanted) > request.min_tokens
        assert outcome.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert outcome.stop_id == (last if stopped and last != EOS else None)
