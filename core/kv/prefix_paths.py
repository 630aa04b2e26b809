"""Paths of cached prefixes for the admin API; the prefix cache itself only maps digests to blocks.

A *path* is the digests and tokens of an ended request. Each ended request triggers a check of two older paths, and
paths without cached blocks are dropped. So there are at most twice as many paths as cached blocks, and a block costs
nothing. Paths share the parts of their common prefix:

    ┌── part of 32 blocks ── part of 32 blocks ── last blocks
    └── the same part     ── another part      ── last blocks
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec

from quintet.core.kv.groups import Groups
from quintet.core.kv.pool import BlockPool
from quintet.core.kv.prefix import AnyOf, key_of, reach

CHECKS_PER_ADD = 2
"""Paths checked when one is added: more than one, so that stale paths do not accumulate."""

PART_BLOCKS = 32
"""Blocks of a part, except the last one of a path. Paths keep common blocks once, except those in their last parts."""


class PathPart(msgspec.Struct, eq=False, weakref=True):
    """Consecutive blocks of a path. Both lists grow while their request lives."""

    digests: list[bytes]
    tokens: Sequence[int] | None
    """At least those of these blocks; None for embeddings."""


class PrefixPath(msgspec.Struct, eq=False):
    """Path of one request, in parts of `PART_BLOCKS`, or in one part."""

    parts: list[PathPart]
    used_ns: int

    @property
    def num_blocks(self) -> int:
        return sum(len(part.digests) for part in self.parts)

    @property
    def digests(self) -> list[bytes]:
        if len(self.parts) == 1:
            return self.parts[0].digests
        return [digest for part in self.parts for digest in part.digests]

    @property
    def tokens(self) -> Sequence[int] | None:
        """At least the tokens of its blocks; None for embeddings."""
        tokens = array("i")
        for part in self.parts:
            if part.tokens is None:
                return None
            tokens.extend(part.tokens)
        return tokens

    def following(self, position: int, digest: bytes) -> list[bytes]:
        """Return the digests from ``position`` on if the one there is ``digest``; otherwise none."""
        index = min(position // PART_BLOCKS, len(self.parts) - 1)
        own = self.parts[index].digests[position - index * PART_BLOCKS :]
        if own[:1] != [digest]:
            return []
        return own + [each for part in self.parts[index + 1 :] for each in part.digests]


@dataclass(slots=True)
class PrefixPaths:
    """All paths of one engine."""

    _paths: deque[PrefixPath] = field(default_factory=deque)
    _by_end: dict[bytes, PrefixPath] = field(default_factory=dict)
    """Of checked paths: last cached block -> newest path."""
    _parts: WeakValueDictionary[tuple[bytes, bool], PathPart] = field(default_factory=WeakValueDictionary)
    """Parts of all paths, by their last digest, and whether they lack tokens."""
    now_ns: int = 0
    """Time of the newest plan."""
    reach: Callable[[list[bytes]], int] = lambda digests: 0
    """Returns the number of these blocks after which a request could start."""
    block_size: int = 0
    """Tokens per block."""

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, digests: list[bytes], tokens: list[int] | None) -> None:
        """Add the path of an ended request."""
        size, parts = self.block_size, list[PathPart]()
        for begin in range(0, len(digests), PART_BLOCKS):
            own = digests[begin : begin + PART_BLOCKS]
            parts.append(self._part(own, tokens and tokens[begin * size : (begin + len(own)) * size]))
        self._paths.append(PrefixPath(parts, self.now_ns))
        for _ in range(min(CHECKS_PER_ADD, len(self._paths))):
            self._check_path(self._paths.popleft())

    def newest_first(self) -> list[PrefixPath]:
        """Return all paths, most recently used first."""
        return sorted(self._paths, key=lambda entry: -entry.used_ns)

    def _part(self, digests: list[bytes], tokens: Sequence[int] | None) -> PathPart:
        """Return a part of other paths with these blocks, or a new one. Parts with one last digest begin at the same block."""
        is_shared, key = len(digests) == PART_BLOCKS, (digests[-1], tokens is None)
        part = self._parts.get(key) if is_shared else None
        if part is None:
            part = PathPart(digests, None if tokens is None else array("i", tokens))
            if is_shared:
                self._parts[key] = part
        return part

    def _check_path(self, entry: PrefixPath) -> None:
        """Keep a path if part of it is cached and no newer path covers that part."""
        digests = entry.digests
        if self._by_end.get(digests[-1]) is entry:
            del self._by_end[digests[-1]]
        num_held = self.reach(digests)
        if not num_held:
            return
        if num_held < len(digests):  # copied: a tree may hold this path
            num_whole, rest = divmod(num_held, PART_BLOCKS)
            parts = entry.parts[:num_whole]
            if rest:
                cut = entry.parts[num_whole]
                parts.append(
                    self._part(cut.digests[:rest], cut.tokens and cut.tokens[: rest * self.block_size])
                )
            entry = PrefixPath(parts, entry.used_ns)
        end = digests[num_held - 1]
        other = self._by_end.get(end)
        if other is not None:
            other.used_ns = max(other.used_ns, entry.used_ns)
            return
        self._by_end[end] = entry
        self._paths.append(entry)


class Locations:
    """Locations of block contents."""

    def __init__(self, pool: BlockPool, groups: Groups) -> None:
        self._groups = groups
        self.block_size = groups.spec.block_size
        tiers = [tier for tier in pool.tiers.all if tier.capacity.num_places]
        held: dict[str, Container[bytes]] = {tier.name: tier.held for tier in tiers}
        self._places: dict[str, Container[bytes]] = {"device": pool.index.block_of, **held}
        self._known = AnyOf(*self._places.values()) if held else self._places["device"]

    def reach(self, path: list[bytes]) -> int:
        """Return the number of a prefix's blocks after which a request can start."""
        return reach(self._known, path, len(path), self._groups)

    def keys(self, path: list[bytes]) -> list[bytes]:
        """Return the keys of these blocks, in every group."""
        return [key_of(digest, group) for digest in path for group in range(len(self._groups.all))]

    def counts(self, keys: Sequence[bytes]) -> Counter[str]:
        """Return the number of these keys on the device, and in back ends by name."""
        return Counter({name: sum(key in place for key in keys) for name, place in self._places.items()})
