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
from collections.abc import Callable, Iterable, Sequence

from quintet.wire.codec import pack_i32

LOOKED_AT = 2
"""Paths checked when one is added: more than one, so that stale paths do not accumulate."""


class PrefixPath:
    """Path of one request."""

    __slots__ = ("digests", "tokens", "used_ns")

    def __init__(self, digests: list[bytes], tokens: Sequence[int] | None, used_ns: int) -> None:
        """tokens: at least those of these blocks; None for embeddings. Both lists grow while the request lives."""
        self.digests = digests
        self.tokens = tokens
        self.used_ns = used_ns


class PrefixPaths:
    """All paths of one engine."""

    __slots__ = ("_by_end", "_trails", "block_size", "now_ns", "reach")

    def __init__(self) -> None:
        self._trails: deque[PrefixPath] = deque()
        self._by_end: dict[bytes, PrefixPath] = {}
        """Of checked paths: last cached block -> newest path."""
        self.now_ns = 0
        """Time of the newest plan."""
        self.reach: Callable[[list[bytes]], int] = lambda digests: 0
        """Returns the number of these blocks after which a request could start."""
        self.block_size = 0
        """Tokens per block."""

    def __len__(self) -> int:
        return len(self._trails)

    def add(self, digests: list[bytes], tokens: list[int] | None) -> None:
        """Add the path of an ended request."""
        self._trails.append(PrefixPath(digests, None if tokens is None else array("i", tokens), self.now_ns))
        for _ in range(min(LOOKED_AT, len(self._trails))):
            self._look_at(self._trails.popleft())

    def _look_at(self, trail: PrefixPath) -> None:
        """Keep a path if part of it is cached and no newer path covers that part."""
        last = trail.digests[-1]
        if self._by_end.get(last) is trail:
            del self._by_end[last]
        num_held = self.reach(trail.digests)
        if not num_held:
            return
        if num_held < len(trail.digests):  # copied: a tree may hold this path
            tokens = None if trail.tokens is None else trail.tokens[: num_held * self.block_size]
            trail = PrefixPath(trail.digests[:num_held], tokens, trail.used_ns)
        end = trail.digests[-1]
        other = self._by_end.get(end)
        if other is not None:
            other.used_ns = max(other.used_ns, trail.used_ns)
            return
        self._by_end[end] = trail
        self._trails.append(trail)

    def tree(self, live: Iterable[PrefixPath]) -> PrefixTree:
        """Return an unbuilt tree of the cached prefixes of these paths and of live requests; call `grow`."""
        trails = [*live, *sorted(self._trails, key=lambda trail: -trail.used_ns)]
        return PrefixTree(trails, self.reach)


class PrefixTree:
    """Snapshot of the prefixes; not atomic if built over several iterations."""

    def __init__(self, trails: list[PrefixPath], reach: Callable[[list[bytes]], int]) -> None:
        """paths: most recently used first."""
        self._trails = trails
        self._reach = reach
        self._num_grown = 0
        """Number of paths already added."""
        self.places: dict[bytes, tuple[PrefixPath, int]] = {}
        """Digest -> newest path that contains it, and the position there."""
        self._num_next: dict[bytes, int] = {}
        self._ends: dict[bytes, None] = {}

    def grow(self, num_blocks: int | None = None) -> bool:
        """Add paths of about ``num_blocks`` blocks, or all; return True when the tree is complete."""
        while self._num_grown < len(self._trails) and (num_blocks is None or num_blocks > 0):
            trail = self._trails[self._num_grown]
            self._num_grown += 1
            self._add(trail)
            if num_blocks is not None:
                num_blocks -= len(trail.digests)
        return self._num_grown == len(self._trails)

    def _add(self, trail: PrefixPath) -> None:
        digests, is_new = trail.digests, False
        for position in range(self._reach(digests) - 1, -1, -1):
            digest = digests[position]
            if is_new:
                self._num_next[digest] = self._num_next.get(digest, 0) + 1
                self._ends.pop(digest, None)
            if digest in self.places:
                break
            self.places[digest] = trail, position
            if not is_new:
                self._ends[digest] = None
            is_new = True

    def ends(self) -> list[bytes]:
        """Return the last block of every prefix that is not continued, most recently used first."""
        return list(self._ends)

    def num_next(self, digest: bytes) -> int:
        """Return the number of children of this block."""
        return self._num_next.get(digest, 0)

    def path(self, digest: bytes) -> list[bytes]:
        """Return the digests of the prefix with this last block, in order; empty if unknown."""
        if digest not in self.places:
            return []
        trail, position = self.places[digest]
        return trail.digests[: position + 1]

    def tokens(self, digest: bytes, block_size: int) -> bytes:
        """Return the tokens of this prefix, int32; empty if unknown."""
        if digest not in self.places:
            return b""
        trail, position = self.places[digest]
        return b"" if trail.tokens is None else pack_i32(trail.tokens[: (position + 1) * block_size])

    def used_ns(self, digest: bytes) -> int | None:
        """Return the time of the prefix's last use; None if unknown."""
        return self.places[digest][0].used_ns if digest in self.places else None

    def following(self, path: list[bytes]) -> set[bytes]:
        """Return the blocks of all continuations of this prefix, cached or not."""
        end = len(path) - 1
        return {
            digest
            for trail in self._trails
            if len(trail.digests) > end and trail.digests[end] == path[end]
            for digest in trail.digests[end:]
        }
