"""Which block follows which: what tells an operator of prefixes, where the prefix cache knows only their ends.

A *trail* is what a request that has ended left behind: the digests of its blocks, in order, and its tokens. Of what is held no
longer a trail is forgotten in passing: each request that ends has two others looked at. So there are no more of them than twice
the blocks that are held, and a block costs the core nothing.

A *tree* is made of them when somebody asks, some blocks at a time while there are steps to plan::

    ┌── block ── block ── block         one prefix, three blocks long: its end is what nothing follows
    └── block ──┬ block                 another
                └ block                 and a third, which shares one block with it
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from quintet.wire.codec import pack_i32

LOOKED_AT = 2
"""PrefixPaths that are looked at when one is added: more than one, so that those of what is gone do not add up."""


class PrefixPath:
    """What one request left behind."""

    __slots__ = ("digests", "tokens", "used_ns")

    def __init__(self, digests: list[bytes], tokens: Sequence[int] | None, used_ns: int) -> None:
        """tokens: of these blocks at least; None of vectors. Of a request that lives both grow."""
        self.digests = digests
        self.tokens = tokens
        self.used_ns = used_ns


class PrefixPaths:
    """All of one engine."""

    __slots__ = ("_by_end", "_trails", "block_size", "now_ns", "reach")

    def __init__(self) -> None:
        self._trails: deque[PrefixPath] = deque()
        self._by_end: dict[bytes, PrefixPath] = {}
        """Of those that were looked at: the last block that is held -> the newest."""
        self.now_ns = 0
        """When the newest plan was begun."""
        self.reach: Callable[[list[bytes]], int] = lambda digests: 0
        """Returns behind how many of these blocks a request could begin."""
        self.block_size = 0
        """Tokens of a block."""

    def __len__(self) -> int:
        return len(self._trails)

    def add(self, digests: list[bytes], tokens: list[int] | None) -> None:
        """Hear of a request that has ended."""
        self._trails.append(PrefixPath(digests, None if tokens is None else array("i", tokens), self.now_ns))
        for _ in range(min(LOOKED_AT, len(self._trails))):
            self._look_at(self._trails.popleft())

    def _look_at(self, trail: PrefixPath) -> None:
        """Keep a trail if something of it is held, and no newer one says as much."""
        last = trail.digests[-1]
        if self._by_end.get(last) is trail:
            del self._by_end[last]
        num_held = self.reach(trail.digests)
        if not num_held:
            return
        if num_held < len(trail.digests):  # in another one, as a tree may have this one
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
        """Return what is held, of these trails and of requests that live; it is to be grown."""
        trails = [*live, *sorted(self._trails, key=lambda trail: -trail.used_ns)]
        return PrefixTree(trails, self.reach)


class PrefixTree:
    """Prefixes at one moment, or, where it grows in several turns, at several."""

    def __init__(self, trails: list[PrefixPath], reach: Callable[[list[bytes]], int]) -> None:
        """trails: those that were used last first."""
        self._trails = trails
        self._reach = reach
        self._num_grown = 0
        """Of the trails."""
        self.places: dict[bytes, tuple[PrefixPath, int]] = {}
        """Digest -> the newest trail that it is on, and where."""
        self._num_next: dict[bytes, int] = {}
        self._ends: dict[bytes, None] = {}

    def grow(self, num_blocks: int | None = None) -> bool:
        """Go on with some more trails, of about so many blocks or of all; return whether that were all."""
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
        """Return the last block of every prefix that nothing follows, those that were used last first."""
        return list(self._ends)

    def num_next(self, digest: bytes) -> int:
        """Return how many blocks follow this one."""
        return self._num_next.get(digest, 0)

    def path(self, digest: bytes) -> list[bytes]:
        """Return the digests of the prefix with this last block, from its first one on; none where it is not known."""
        if digest not in self.places:
            return []
        trail, position = self.places[digest]
        return trail.digests[: position + 1]

    def tokens(self, digest: bytes, block_size: int) -> bytes:
        """Return the tokens of this prefix, int32; nothing where they are not known."""
        if digest not in self.places:
            return b""
        trail, position = self.places[digest]
        return b"" if trail.tokens is None else pack_i32(trail.tokens[: (position + 1) * block_size])

    def used_ns(self, digest: bytes) -> int | None:
        """Return when a prefix was last used; None where that is not known."""
        return self.places[digest][0].used_ns if digest in self.places else None

    def following(self, path: list[bytes]) -> set[bytes]:
        """Return the blocks of all that begins with this prefix, behind it, held or not."""
        end = len(path) - 1
        return {
            digest
            for trail in self._trails
            if len(trail.digests) > end and trail.digests[end] == path[end]
            for digest in trail.digests[end:]
        }
