"""Tree of cached prefixes for the admin API; the prefix cache itself only maps digests to blocks.

A *path* is the digests and tokens of an ended request. Each ended request triggers a check of two older paths, and
paths without cached blocks are dropped. So there are at most twice as many paths as cached blocks, and a block costs
nothing.

    ┌── block ── block ── block         one prefix of three blocks; no block follows its end
    └── block ──┬ block                 another one
                └ block                 and a third, which shares one block with it
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quintet.core.kv.disk_pool import DiskPool
from quintet.core.kv.groups import Groups
from quintet.core.kv.pool import BlockPool
from quintet.core.kv.prefix import AnyOf, key_of, reach
from quintet.wire.codec import pack_i32

CHECKS_PER_ADD = 2
"""Paths checked when one is added: more than one, so that stale paths do not accumulate."""


@dataclass(slots=True, eq=False)
class PrefixPath:
    """Path of one request. Both lists grow while the request lives."""

    digests: list[bytes]
    tokens: Sequence[int] | None
    """At least those of these blocks; None for embeddings."""
    used_ns: int


class PrefixPaths:
    """All paths of one engine."""

    __slots__ = ("_by_end", "_paths", "block_size", "now_ns", "reach")

    def __init__(self) -> None:
        self._paths: deque[PrefixPath] = deque()
        self._by_end: dict[bytes, PrefixPath] = {}
        """Of checked paths: last cached block -> newest path."""
        self.now_ns = 0
        """Time of the newest plan."""
        self.reach: Callable[[list[bytes]], int] = lambda digests: 0
        """Returns the number of these blocks after which a request could start."""
        self.block_size = 0
        """Tokens per block."""

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, digests: list[bytes], tokens: list[int] | None) -> None:
        """Add the path of an ended request."""
        self._paths.append(PrefixPath(digests, None if tokens is None else array("i", tokens), self.now_ns))
        for _ in range(min(CHECKS_PER_ADD, len(self._paths))):
            self._check_path(self._paths.popleft())

    def _check_path(self, entry: PrefixPath) -> None:
        """Keep a path if part of it is cached and no newer path covers that part."""
        last = entry.digests[-1]
        if self._by_end.get(last) is entry:
            del self._by_end[last]
        num_held = self.reach(entry.digests)
        if not num_held:
            return
        if num_held < len(entry.digests):  # copied: a tree may hold this path
            tokens = None if entry.tokens is None else entry.tokens[: num_held * self.block_size]
            entry = PrefixPath(entry.digests[:num_held], tokens, entry.used_ns)
        end = entry.digests[-1]
        other = self._by_end.get(end)
        if other is not None:
            other.used_ns = max(other.used_ns, entry.used_ns)
            return
        self._by_end[end] = entry
        self._paths.append(entry)

    def tree(self, live: Iterable[PrefixPath]) -> PrefixTree:
        """Return an unbuilt tree of the cached prefixes of these paths and of live requests; call `grow`."""
        paths = [*live, *sorted(self._paths, key=lambda entry: -entry.used_ns)]
        return PrefixTree(paths, self.reach)


class PrefixTree:
    """Snapshot of the prefixes; not atomic if built over several iterations."""

    def __init__(self, paths: list[PrefixPath], reach: Callable[[list[bytes]], int]) -> None:
        """paths: most recently used first."""
        self._paths = paths
        self._reach = reach
        self._num_grown = 0
        """Number of paths already added."""
        self.places: dict[bytes, tuple[PrefixPath, int]] = {}
        """Digest -> newest path that contains it, and the position there."""
        self._num_next: dict[bytes, int] = {}
        """Digest -> number of its children, if it has any."""

    def grow(self, num_blocks: int | None = None) -> bool:
        """Add paths of about ``num_blocks`` blocks, or all; return True when the tree is complete."""
        while self._num_grown < len(self._paths) and (num_blocks is None or num_blocks > 0):
            entry = self._paths[self._num_grown]
            self._num_grown += 1
            self._add(entry)
            if num_blocks is not None:
                num_blocks -= len(entry.digests)
        return self._num_grown == len(self._paths)

    def _add(self, entry: PrefixPath) -> None:
        digests, is_new = entry.digests, False
        for position in range(self._reach(digests) - 1, -1, -1):
            digest = digests[position]
            if is_new:
                self._num_next[digest] = self._num_next.get(digest, 0) + 1
            if digest in self.places:
                break
            self.places[digest] = entry, position
            is_new = True

    def ends(self) -> list[bytes]:
        """Return the last block of every prefix that is not continued, most recently used first."""
        return [digest for digest in self.places if digest not in self._num_next]

    def num_next(self, digest: bytes) -> int:
        """Return the number of children of this block."""
        return self._num_next.get(digest, 0)

    def path(self, digest: bytes) -> list[bytes]:
        """Return the digests of the prefix with this last block, in order; empty if unknown."""
        if digest not in self.places:
            return []
        entry, position = self.places[digest]
        return entry.digests[: position + 1]

    def tokens(self, digest: bytes, block_size: int) -> bytes:
        """Return the tokens of this prefix, int32; empty if unknown."""
        if digest not in self.places:
            return b""
        entry, position = self.places[digest]
        return b"" if entry.tokens is None else pack_i32(entry.tokens[: (position + 1) * block_size])

    def used_ns(self, digest: bytes) -> int | None:
        """Return the time of the prefix's last use; None if unknown."""
        return self.places[digest][0].used_ns if digest in self.places else None

    def following(self, path: list[bytes]) -> set[bytes]:
        """Return the blocks of all continuations of this prefix, cached or not."""
        end = len(path) - 1
        return {
            digest
            for entry in self._paths
            if len(entry.digests) > end and entry.digests[end] == path[end]
            for digest in entry.digests[end:]
        }


class Locations:
    """Locations of block contents."""

    def __init__(self, pool: BlockPool, groups: Groups) -> None:
        tiers, disk = pool.tiers, pool.tiers.find(DiskPool)
        self._groups = groups.all
        self.block_size = groups.spec.block_size
        self._places: list[Mapping[bytes, int]] = [
            pool.index.block_of,
            tiers.host.block_of,
            {} if disk is None else disk.place_of,
        ]
        self._known: Container[bytes] = (
            AnyOf(*self._places) if disk is not None or tiers.host.num_blocks else self._places[0]
        )

    def reach(self, path: list[bytes]) -> int:
        """Return the number of a prefix's blocks after which a request can start."""
        return reach(self._known, path, len(path), self._groups, self.block_size)

    def keys(self, path: list[bytes]) -> list[bytes]:
        """Return the keys of these blocks, in every group."""
        return [key_of(digest, group) for digest in path for group in range(len(self._groups))]

    def counts(self, keys: Sequence[bytes]) -> list[int]:
        """Return the number of these keys on the device, in host memory and on disk."""
        return [sum(key in place for key in keys) for place in self._places]
