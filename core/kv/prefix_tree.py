"""Tree of cached prefixes for the admin API, from the paths of ended and live requests.

┌── block ── block ── block         one prefix of three blocks; no block follows its end
└── block ──┬ block                 another one
            └ block                 and a third, which shares one block with it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quintet.core.kv.prefix_paths import PrefixPath
from quintet.wire.codec import pack_i32


@dataclass(slots=True)
class PrefixTree:
    """Snapshot of the prefixes; not atomic if built over several iterations."""

    _paths: list[PrefixPath]
    """Most recently used first."""
    _reach: Callable[[list[bytes]], int]
    _num_grown: int = 0
    """Number of paths already added."""
    places: dict[bytes, tuple[PrefixPath, int]] = field(default_factory=dict)
    """Digest -> newest path that contains it, and the position there."""
    num_next: Counter[bytes] = field(default_factory=Counter)
    """Digest -> number of its children."""

    def grow(self, num_blocks: int | None = None) -> bool:
        """Add paths of about ``num_blocks`` blocks, or all; return True when the tree is complete."""
        while self._num_grown < len(self._paths) and (num_blocks is None or num_blocks > 0):
            entry = self._paths[self._num_grown]
            self._num_grown += 1
            self._add(entry)
            if num_blocks is not None:
                num_blocks -= entry.num_blocks
        return self._num_grown == len(self._paths)

    def _add(self, entry: PrefixPath) -> None:
        digests, is_new = entry.digests, False
        for position in range(self._reach(digests) - 1, -1, -1):
            digest = digests[position]
            if is_new:
                self.num_next[digest] += 1
            if digest in self.places:
                break
            self.places[digest] = entry, position
            is_new = True

    def ends(self) -> list[bytes]:
        """Return the last block of every prefix that is not continued, most recently used first."""
        return [digest for digest in self.places if digest not in self.num_next]

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
        return {digest for entry in self._paths for digest in entry.following(end, path[end])}
