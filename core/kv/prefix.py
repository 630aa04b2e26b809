"""Prefix index: a map from chained block hashes to blocks.

The digest of a block is the SHA-256 of its predecessor's digest, its own tokens, and the digests of spans of
embeddings in it. The chain starts with the hash of the request's cache salt. So equal digests mean equal tokens and
embeddings from the first position on and the same salt, up to a SHA-256 collision. A block belongs to one group of
layers: its key is digest and group.

To start after n blocks, a request needs from each group:

    full       all blocks from the first on
    sliding    those in the next token's window
    chunked    those in the next token's chunk
    state      the state after exactly n blocks

With state groups, a request can also start after an *end* inside a block: where another request stopped, or its state
was checkpointed. It needs the state there, full blocks as above, and of each token group a *tail*, the partial block:

    | full block | full block | tail, partial block |
                              ▲ digest `before`     ▲ digest of the end, computed like that of a full block

A tail is not shared but copied into a block that the request continues to write.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from quintet.core.kv.groups import Groups
from quintet.wire.embeds import EmbedsSpan

DIGEST_BYTES = 32


def salt_digest(salt: str, adapter: bytes = b"") -> bytes:
    """Return the start of the chain for requests with this salt, and with the adapter of this digest."""
    return sha256((b"quintet.lora\0" + adapter if adapter else b"quintet.kv\0") + salt.encode()).digest()


def digest_after(
    before: bytes, tokens: Sequence[int], begin: int, end: int, embeds: Sequence[EmbedsSpan] = ()
) -> bytes:
    """Return the digest of the first tokens of a block, ``[begin, end)``, which follow the digest ``before``.

    It covers ids as int32. A span of embeddings adds its digest before its first token in the block, with -1, which is
    no id, and that token's offset in the span. So blocks are shared only by requests with identical embeddings there.
    """
    if not embeds:
        return sha256(before + array("i", tokens[begin:end]).tobytes()).digest()
    first, parts = begin, [before]
    for span in embeds:
        at = max(first, span.start)
        if begin <= at < min(end, span.end):
            parts += (
                array("i", tokens[begin:at]).tobytes(),
                array("i", (-1, at - span.start)).tobytes(),
                span.digest,
            )
            begin = at
    parts.append(array("i", tokens[begin:end]).tobytes())
    return sha256(b"".join(parts)).digest()


def extend_chain(
    digests: list[bytes],
    start: bytes,
    tokens: list[int],
    block_size: int,
    num_blocks: int,
    embeds: Sequence[EmbedsSpan] = (),
) -> None:
    """Extend ``digests`` to ``num_blocks`` entries: the digests of the first full blocks of ``tokens``."""
    for index in range(len(digests), num_blocks):
        before, first = digests[-1] if digests else start, index * block_size
        digests.append(digest_after(before, tokens, first, first + block_size, embeds))


def key_of(digest: bytes, group: int) -> bytes:
    """Return the key of a group's block; for the first group the digest itself."""
    return digest + group.to_bytes(2, "little") if group else digest


def run_of(keys: Iterable[bytes], block_of: Mapping[bytes, int]) -> list[int]:
    """Return the blocks of the leading keys that are known."""
    found: list[int] = []
    for key in keys:
        block = block_of.get(key)
        if block is None:
            break
        found.append(block)
    return found


class AnyOf:
    """Union of several containers."""

    def __init__(self, *places: Container[bytes]) -> None:
        self._places = places

    def __contains__(self, key: object) -> bool:
        return any(key in place for place in self._places)


def reach(known: Container[bytes], digests: list[bytes], most: int, groups: Groups) -> int:
    """Return the largest number of blocks, at most ``most``, after which a request can start given the ``known`` keys."""
    is_agreed = False
    while most and not is_agreed:
        before = most
        for index in range(len(groups.all)):
            most = _serves(known, digests, most, groups, index)
        is_agreed = most == before
    return most


def _serves(known: Container[bytes], digests: list[bytes], most: int, groups: Groups, index: int) -> int:
    """Return the largest number of blocks, at most ``most``, after which this group has what a token reads."""
    group = groups.all[index]
    if group.kind == "full":
        for position in range(most):
            if key_of(digests[position], index) not in known:
                return position
        return most
    if group.is_state:
        while most and key_of(digests[most - 1], index) not in known:
            most -= 1
        return most
    position = most - 1
    while most and position >= groups.first_block(index, most * groups.spec.block_size):
        if key_of(digests[position], index) not in known:
            most = position
        position -= 1
    return most


@dataclass(slots=True)
class PrefixIndex:
    """Keys of the blocks with known content. One block per key, one key per block."""

    block_of: dict[bytes, int] = field(default_factory=dict)
    key_of: dict[int, bytes] = field(default_factory=dict)
    ends: dict[bytes, Counter[int]] = field(default_factory=dict)
    """Digest of the full blocks before an end -> tail lengths, with the number of ends of each."""
    end_of: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """State block of an end, in the first state group -> digest before it, tail length."""
    on_register: Callable[[bytes, int], None] | None = None
    """Callback for full blocks that were registered (pins)."""

    def holds(self, block: int) -> bool:
        """Return True when the block's content is known."""
        return block in self.key_of

    def register(self, key: bytes, block: int) -> None:
        """Register a full block, unless another block has its content already."""
        if key not in self.block_of and block not in self.key_of:
            self.block_of[key] = block
            self.key_of[block] = key
            if self.on_register is not None:
                self.on_register(key, block)

    def forget(self, block: int) -> bytes:
        """Remove a block that is about to be overwritten; return the key of its content."""
        key = self.key_of.pop(block)
        del self.block_of[key]
        if block in self.end_of:
            before, length = self.end_of.pop(block)
            lengths = self.ends[before]
            lengths[length] -= 1
            if not lengths[length]:
                del lengths[length]
            if not lengths:
                del self.ends[before]
        return key

    def register_end(
        self, before: bytes, digest: bytes, length: int, states: dict[int, int], tails: dict[int, int]
    ) -> None:
        """Register an end after ``length`` tokens, fewer than a block. states, tails: block by group."""
        for group, block in (states | tails).items():
            key = key_of(digest, group)
            if key not in self.block_of and block not in self.key_of:
                self.block_of[key], self.key_of[block] = block, key
        block = self.block_of[key_of(digest, min(states))]
        if block not in self.end_of:
            self.end_of[block] = before, length
            self.ends.setdefault(before, Counter())[length] += 1

    def blocks_of_ends(self, before: set[bytes]) -> list[int]:
        """Return the blocks of all ends after these digests: states and tails."""
        digests = {
            self.key_of[block][:DIGEST_BYTES]
            for block, (digest, _) in self.end_of.items()
            if digest in before
        }
        return [block for key, block in self.block_of.items() if key[:DIGEST_BYTES] in digests]
