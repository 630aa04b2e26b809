"""KV connector: start requests after KV of the back ends, where that is cheaper than computing.

**Remote back ends** (peer, disk, store), for waiting requests. Each is looked up once, cheapest first. What the device
and cheaper back ends lack is fetched; meanwhile other requests pass. Then the request enters as after a prefix cache
hit.

**Host memory**, for preempted requests (`quintet.core.kv.swap_pool`). Groups with windows or states also save the
partial last block and the states. A resumed request shares the blocks still on the device and restores the following
ones.

All costs are measured: fetches and searches by the executor, copies at its start (`Capacity.swap_bytes_per_s`), the
compute speed by `quintet.core.throughput`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from quintet.core.block_keys import digests_of, keys_after, match_after
from quintet.core.hooks import Feature, PrefixMatch, Setup
from quintet.core.kv.groups import GroupBlocks
from quintet.core.kv.prefetch import FetchRequest
from quintet.core.kv.prefix import AnyOf, reach, run_of
from quintet.core.kv.tier import Tier, Wanted
from quintet.core.recurrent_state import last_checkpoint
from quintet.core.requests.request import Request, Status
from quintet.core.scheduler_state import SchedulerState


def build(setup: Setup) -> Feature | None:
    cache = setup.cache
    if not (cache.remote_tiers or cache.swap_bytes):
        return None
    return Feature(
        "kv_connector",
        can_schedule=can_schedule if cache.remote_tiers else None,
        match_prefix=match_prefix,
        on_preempt=on_preempt if cache.swap_bytes else None,
    )


def can_schedule(state: SchedulerState, request: Request) -> bool:
    """Delay a request while blocks are being fetched for it. A poison-isolation trial waits for nothing."""
    if state.trial is not None:
        return True
    for tier in state.pool.tiers.remote:
        fetch = tier.fetches.requests.get(request.request_id)
        if fetch.pending if fetch is not None else not _ask(state, tier, request):
            return False
    return True


def match_prefix(state: SchedulerState, request: Request) -> PrefixMatch | None:
    """Match blocks on the device, then those of the back end with the longest prefix."""
    return _longest_match(state, request, state.pool.tiers.all)


# --- remote back ends ---


def _ask(state: SchedulerState, tier: Tier, request: Request) -> bool:
    """Look up a request and fetch its blocks if that is cheaper than computing. Return True when it may enter now.

    When host blocks are short, it is asked again if it still waits.
    """
    wanted = _wanted(state, request)
    if tier.stays_queued(wanted):
        return False
    groups, size, index = state.limits.groups, state.limits.block_size, state.pool.index
    most = tier.max_blocks(wanted) if request.spec.params.reads_prefix_cache else 0
    digests = digests_of(state, request, most)
    num_known = reach(index.block_of, digests, most, groups)
    if num_known < most:
        num_known = max(num_known, _num_fetched(state, tier, request))
    computing_ns = state.throughput.time_of((most - num_known) * size)
    sources = tier.look_up(wanted, digests, computing_ns) if num_known < most else {}
    if sources is None:
        return False
    num_reachable = reach(AnyOf(index.block_of, sources), digests, most, groups)
    missing: list[bytes] = []
    for group in range(len(groups.all)):
        keys = keys_after(state, request, group, num_reachable * size)
        tier.use(keys)
        missing += keys[len(run_of(keys, index.block_of)) :]
    found = {key: sources[key] for key in missing if key in sources}
    computing_ns = state.throughput.time_of((num_reachable - num_known) * size)
    if (
        tier.is_paused
        or num_reachable <= num_known
        or len(found) < len(missing)
        or not tier.is_cheaper([*found.values()], computing_ns)
    ):
        tier.fetches.requests[request.request_id] = FetchRequest()
        return True
    if tier.fetch(wanted, found, num_reachable * size, whole=not groups.is_plain):
        return not tier.fetches.requests[request.request_id].pending
    return not (tier.does_wait and tier.fetches.frees_host_blocks)


def offer(state: SchedulerState, request: Request) -> None:
    """Offer the full prompt blocks of a request that has just ended to other servers, while the device still has them."""
    remote, kv_transfer = state.pool.tiers.remote, request.spec.kv_transfer
    if not remote or kv_transfer is None or not kv_transfer.offers:
        return
    groups, size = state.limits.groups, state.limits.block_size
    most = request.num_prompt // size
    num_blocks = reach(state.pool.index.block_of, digests_of(state, request, most), most, groups)
    for group in range(len(groups.all)):
        keys = keys_after(state, request, group, num_blocks * size)
        for tier in remote:
            tier.offer(keys)


def _wanted(state: SchedulerState, request: Request) -> Wanted:
    """Return the blocks that could be fetched for a request. Only before it first runs may they be a peer's."""
    limits, kv_transfer = state.limits, request.spec.kv_transfer
    num_blocks = (len(request.tokens) - 1) // limits.block_size
    wanted = Wanted(request.request_id, request.rank, num_blocks)
    is_first = request.parent is None and request.stats.scheduled_ns is None
    if kv_transfer is None or not kv_transfer.peer or not is_first:
        return wanted
    num_offered = kv_transfer.num_blocks
    if limits.groups.states:
        num_offered = min(num_offered, last_checkpoint(limits, request.num_prompt) // limits.block_size)
    return replace(wanted, peer=kv_transfer.peer, num_offered=num_offered)


def _num_fetched(state: SchedulerState, tier: Tier, request: Request) -> int:
    """Return the number of the request's blocks that cheaper back ends provide."""
    tiers = state.pool.tiers.all
    found = _longest_match(state, request, tiers[: tiers.index(tier)])
    return 0 if found is None else found.num_tokens // state.limits.block_size


def _longest_match(state: SchedulerState, request: Request, tiers: Sequence[Tier]) -> PrefixMatch | None:
    best = None
    for tier in tiers:
        found = _match_fetched(state, tier, request)
        if found is not None and (best is None or found.num_tokens >= best.num_tokens):
            best = found
    return best


def _match_fetched(state: SchedulerState, tier: Tier, request: Request) -> PrefixMatch | None:
    fetch = tier.fetches.requests.get(request.request_id)
    if fetch is None or not fetch.num_tokens or request.status is Status.RUNNING:
        return None
    found = match_after(state, request, fetch.num_tokens, tier.fetches.fetch)
    if found is None or not any(found.restored):
        return None
    if tier.is_local:
        num_restored, is_plain = sum(map(len, found.restored)), state.limits.groups.is_plain
        num_saved = num_restored * state.limits.block_size if is_plain else found.num_tokens
        has_blocks = is_plain or state.has_spare_blocks(request, len(found.known_tails))
        if not has_blocks or not _is_copying_cheaper(state, num_saved, num_restored):
            return None
    num_cached = min(found.num_tokens, request.num_prompt)
    return replace(found, num_cached=num_cached, num_queried=len(request.tokens))


# --- host memory ---


def on_preempt(state: SchedulerState, request: Request) -> None:
    """Save the blocks from which the request can resume.

    All planned tokens are computed before the next plan's copies. Only blocks of known tokens count: those in flight
    are drawn again.
    """
    if not request.spec.params.reads_prefix_cache:
        return
    groups = state.limits.groups
    num_tokens, held = _resumable_prefix(state, request)
    contents: dict[bytes, int] = {}
    for number, group in enumerate(groups.all if num_tokens else ()):
        keys, blocks = keys_after(state, request, number, num_tokens), held[number].blocks[-1:]
        if not group.is_state:
            skipped = groups.first_block(number, num_tokens) - held[number].begin
            if skipped < 0:
                return
            blocks = held[number].blocks[skipped : skipped + len(keys)]
        contents |= zip(keys, blocks, strict=True)
    if not contents or not _is_copying_cheaper(state, num_tokens, 2 * len(contents)):
        return
    for tier in state.pool.tiers.all:
        for key in tier.save(request.request_id, [*contents], num_tokens):
            if key not in state.pool.index.block_of:
                tier.on_evict(key, contents[key])


def _resumable_prefix(state: SchedulerState, request: Request) -> tuple[int, Sequence[GroupBlocks]]:
    """Return the number of tokens to save, and their blocks.

    With one plain group: the full blocks. Otherwise usually all computed tokens, including the partial last block,
    since a window has released older blocks. If the token after a state is unknown and prefix caching is on, it is the
    longest cached prefix with a checkpointed state.
    """
    limits, planned = state.limits, request.planned
    num_known = min(planned, len(request.tokens) - 1)
    num_blocks = num_known // limits.block_size
    if limits.groups.is_plain:
        return num_blocks * limits.block_size, request.kv.held
    if not limits.groups.states or request.kv.state_start < planned < len(request.tokens):
        return num_known, request.kv.held
    if not limits.prefix_caching:
        return 0, ()
    digests, known = digests_of(state, request, num_blocks), state.pool.index.block_of
    num_blocks = reach(known, digests, num_blocks, limits.groups)
    found = match_after(state, request, num_blocks * limits.block_size)
    return (0, ()) if found is None else (found.num_tokens, found.shared)


def _is_copying_cheaper(state: SchedulerState, num_tokens: int, num_copies: int) -> bool:
    """Return True when the copies take less time than computing the tokens once, or when neither is measured."""
    computing_ns = state.throughput.time_of(num_tokens)
    return computing_ns is None or num_copies * state.limits.block_copy_ns < computing_ns
