"""Keys of the contents that a request needs, per group; KV back ends store contents under them."""

from __future__ import annotations

from quintet.core.kv.prefix import content_of, digest_after, key_of
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
    digests = digests_of(state, request, num_full)
    wanted = digests[first:]
    if length:
        before = digests[-1] if digests else request.salt_digest
        begin = num_tokens - length
        content = content_of(request.tokens, begin, begin, num_tokens, request.embeds)
        wanted.append(digest_after(before, content))
    elif group.is_state:
        wanted = digests[-1:]
    return [key_of(digest, index) for digest in wanted]


def digests_of(state: SchedulerState, request: Request, num_blocks: int) -> list[bytes]:
    """Return the digests of a request's first full blocks."""
    return request.hash_blocks(state.limits.block_size, num_blocks)[:num_blocks]
