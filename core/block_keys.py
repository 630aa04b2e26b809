"""Contents that a request needs to start after a prefix, per group: their keys, under which KV back ends store them, and the
blocks that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quintet.core.hooks import PrefixMatch
from quintet.core.kv.groups import GroupBlocks
from quintet.core.kv.prefix import digest_after, key_of, run_of
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState


def keys_after(state: SchedulerState, request: Request, index: int, num_tokens: int) -> list[bytes]:
    """Return the keys of a group's blocks that a request needs to continue after ``num_tokens`` tokens.

    Without prefix sharing (`Limits.prefix_caching`), for example because KV depends on more than the preceding
    tokens, keys are private to the request.
    """
    limits, group = state.limits, state.limits.groups.all[index]
    num_full, length = divmod(num_tokens, limits.block_size)
    first = num_full if group.is_state else limits.groups.first_block(index, num_tokens)
    if not limits.prefix_caching:
        end = num_full + 1 if group.is_state or length else num_full
        return [b"%d/%d/%d" % (request.request_id, index, position) for position in range(first, end)]
    digests = request.hash_blocks(limits.block_size, num_full)
    wanted = digests[first:num_full]
    if length:
        before = digests[num_full - 1] if num_full else request.salt_digest
        begin = num_tokens - length
        wanted.append(digest_after(before, request.tokens, begin, num_tokens, request.embeds))
    elif group.is_state:
        wanted = digests[num_full - 1 : num_full]
    return [key_of(digest, index) for digest in wanted] if index else wanted


def digests_of(state: SchedulerState, request: Request, num_blocks: int) -> list[bytes]:
    """Return the digests of a request's first full blocks."""
    return request.hash_blocks(state.limits.block_size, num_blocks)[:num_blocks]


def match_after(
    state: SchedulerState,
    request: Request,
    num_tokens: int,
    fetch: Callable[[int, Sequence[bytes]], list[int] | None] = lambda request_id, keys: [],
) -> PrefixMatch | None:
    """Match a request's first ``num_tokens`` tokens: blocks on the device, then host blocks that ``fetch`` returns.

    Less with one plain group if host blocks are missing; otherwise None.
    """
    limits, block_of = state.limits, state.pool.index.block_of
    shared: list[GroupBlocks] = []
    tails: list[int | None] = []
    restored: list[list[int]] = []
    for group, spec in enumerate(limits.groups.all):
        keys, tail = keys_after(state, request, group, num_tokens), list[bytes]()
        if num_tokens % limits.block_size and not spec.is_state:
            tail = [keys.pop()]  # on the device it is only copied
            tails.append(block_of.get(tail[0]))
        blocks = run_of(keys, block_of)
        rest = keys[len(blocks) :] + [key for key in tail if key not in block_of]
        fetched = fetch(request.request_id, rest)
        if fetched is None:
            return None
        if limits.groups.is_plain:
            num_tokens = (len(blocks) + len(fetched)) * limits.block_size
        elif len(fetched) < len(rest):
            return None
        begin = 0 if spec.is_state else limits.groups.first_block(group, num_tokens)
        shared.append(GroupBlocks(begin, blocks))
        restored.append(fetched)
    return PrefixMatch(num_tokens, shared, tails, restored=restored)
