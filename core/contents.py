"""What names the contents that a request needs, group by group: the keys under which tiers keep them."""

from __future__ import annotations

from itertools import takewhile

from quintet.core.kv.prefix import digest_behind, extend_chain, key_of
from quintet.core.request import Request
from quintet.core.state import State


def run_of(keys: list[bytes], block_of: dict[bytes, int]) -> list[int]:
    """Return the blocks of the first of these keys, as long as they are known."""
    blocks = map(block_of.get, keys)
    return [block for block in takewhile(lambda block: block is not None, blocks) if block is not None]


def keys_behind(state: State, request: Request, index: int, num_tokens: int) -> list[bytes]:
    """Return what names the contents of a group's blocks that a request needs which goes on behind so many tokens.

    Where beginnings are not shared (`Limits.prefix_caching`), perhaps because keys and values depend on more than the
    tokens before them, contents are the request's own.
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
        wanted.append(digest_behind(before, request.tokens[num_tokens - length : num_tokens]))
    elif group.is_state:
        wanted = digests[-1:]
    return [key_of(digest, index) for digest in wanted]


def digests_of(state: State, request: Request, num_blocks: int) -> list[bytes]:
    """Return the digests of a request's first full blocks."""
    extend_chain(request.digests, request.salt_digest, request.tokens, state.limits.block_size, num_blocks)
    return request.digests[:num_blocks]
