"""Index of a token buffer by its grams: earlier places of the newest tokens, newest first.

A *place* is the position of the token after a gram. For each gram length (for example 1, 2, 4 and 8 tokens), places
with the same hash of their gram form a chain, newest first: the hash chains of DEFLATE (RFC 1951, section 4). A lookup
takes the longest gram with an earlier place, and compares up to `MAX_PLACES` places of that chain. So adding a token
and a lookup take constant time, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

MAX_PLACES = 8
"""Maximum places of a lookup, the newest ones. Places of other grams with the same hash do not count."""

_MAX_VISITS = 32
"""Maximum places of a chain that a lookup visits, other grams included."""

_BASE, _MIX, _MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, (1 << 64) - 1
"""Factors of the hash: of the polynomial in the tokens, and before its upper bits are taken."""

_DISTANCE_BITS, _DISTANCE_MASK, _FINGERPRINT = 32, (1 << 32) - 1, (1 << 31) - 1
"""A link has a distance in its lower bits, and above them a fingerprint: the lower 31 bits of the gram's hash."""

_MAX_LOOPED = 32
"""Number of added tokens up to which a loop is faster than NumPy."""


def doubling(shortest: int, longest: int) -> tuple[int, ...]:
    """Return the gram lengths ``shortest``, twice that, and so on up to ``longest``."""
    lengths = [shortest]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)


class Context:
    """The newest tokens of a request, prepared for lookups."""

    __slots__ = ("bits", "hashes", "newest")

    def __init__(self, newest: Tokens, grams: Sequence[int], max_match: int) -> None:
        """newest: int32[n], at most ``max_match`` tokens."""
        self.newest: list[int] = newest[::-1].tolist()
        self.bits = int.from_bytes(newest.tobytes(), "little") << 32 * (max_match - len(newest))
        """The tokens as one number of ``max_match`` words, the newest in the highest word."""
        self.hashes: list[int] = []
        """Hash of the last tokens by gram length, as far as there are tokens."""
        tokens, hashed, length = self.newest, 0, 0
        for gram in grams:
            if gram > len(tokens):
                break
            for token in tokens[length:gram]:
                hashed = (hashed * _BASE + token + 1) & _MASK
            length = gram
            self.hashes.append(hashed)


@dataclass(frozen=True, slots=True)
class Matches:
    """Places after the longest match of a context, newest first."""

    length: int
    places: list[int]


NO_MATCHES = Matches(0, [])


class GramIndex:
    """Hash chains of the places in a buffer, which may be a ring: place ``p`` is at ``p % capacity``."""

    def __init__(
        self, tokens: Tokens, grams: Sequence[int], max_match: int, scopes: NDArray[np.uint64] | None = None
    ) -> None:
        """tokens: the buffer, read only. grams: ascending lengths. max_match: maximum number of compared tokens.

        scopes: uint64 like ``tokens``: a lookup finds only places of its own scope. None: there is one scope.
        """
        self.grams, self._max_match = tuple(grams), max_match
        self.capacity = capacity = len(tokens)
        self._array, self._tokens = tokens, tokens.data
        self._bytes = self._tokens.cast("B")
        self._scopes = None if scopes is None else scopes.data
        num_bits = max(1, (capacity - 1).bit_length())
        self._shift = 64 - num_bits
        self._head_arrays = np.zeros((len(self.grams), 1 << num_bits), np.int64)
        self._link_arrays = np.zeros((len(self.grams), capacity), np.int64)
        self._heads = [row.data for row in self._head_arrays]
        """Newest place of each hash; 0 for none."""
        self._links = [row.data for row in self._link_arrays]
        """Fingerprint of each place's gram, and the distance to the next older place of its chain; 0 for none."""

    @property
    def bytes_per_token(self) -> float:
        """Memory of a full index over its number of tokens, without the tokens."""
        return (self._head_arrays.nbytes + self._link_arrays.nbytes) / self.capacity

    def add(self, begin: int, end: int, start: int, scope: int = 0, oldest: int = 0) -> None:
        """Add the places ``begin`` to ``end - 1`` of a text that starts at ``start``. No gram is longer than the text before it.

        The places must not wrap around the end of the buffer. oldest: places up to it are no longer valid.
        """
        if end - begin > _MAX_LOOPED:
            self._add_many(begin, end, start, scope, oldest)
            return
        tokens, capacity, shift = self._tokens, self.capacity, self._shift
        for place in range(begin, end):
            at, hashed, length = place % capacity, 0, 0
            for gram, heads, links in zip(self.grams, self._heads, self._links, strict=True):
                if gram > place - start:
                    break
                while length < gram:
                    length += 1
                    hashed = (hashed * _BASE + tokens[at - length] + 1) & _MASK
                mixed = (hashed ^ scope) * _MIX & _MASK
                before = heads[mixed >> shift]
                distance = place - before if before > oldest else 0
                links[at] = (mixed & _FINGERPRINT) << _DISTANCE_BITS | distance
                heads[mixed >> shift] = place

    def _add_many(self, begin: int, end: int, start: int, scope: int, oldest: int) -> None:
        places = np.arange(begin, end)
        at, length = places % self.capacity, 0
        hashed = np.zeros(len(places), np.uint64)
        for level, gram in enumerate(self.grams):
            first = max(0, start + gram - begin)
            while length < gram:
                length += 1
                hashed = hashed * np.uint64(_BASE) + (
                    self._array[at - length].astype(np.uint64) + np.uint64(1)
                )
            if first >= len(places):
                break
            mixed = (hashed[first:] ^ np.uint64(scope)) * np.uint64(_MIX)
            buckets = (mixed >> np.uint64(self._shift)).astype(np.int64)
            order = np.argsort(buckets, kind="stable")
            buckets, chained, mixed = buckets[order], places[first:][order], mixed[order]
            is_first = np.concatenate(([True], buckets[1:] != buckets[:-1]))
            heads = self._head_arrays[level]
            before = np.where(is_first, heads[buckets], np.concatenate(([0], chained[:-1])))
            distances = np.where(before > oldest, chained - before, 0)
            fingerprints = (mixed & np.uint64(_FINGERPRINT)).astype(np.int64) << _DISTANCE_BITS
            self._link_arrays[level, at[first:][order]] = fingerprints | distances
            is_last = np.concatenate((is_first[1:], [True]))
            heads[buckets[is_last]] = chained[is_last]

    def find(self, context: Context, scope: int = 0, oldest: int = 0, enough: int = MAX_PLACES) -> Matches:
        """Return the places after the longest match among the newest ones of the longest gram that occurs.

        enough: number of matches of maximum length after which the search ends.
        """
        for level in range(len(context.hashes) - 1, -1, -1):
            mixed = (context.hashes[level] ^ scope) * _MIX & _MASK
            place = self._heads[level][mixed >> self._shift]
            if place > oldest:
                found = self._compare(context, level, place, mixed & _FINGERPRINT, scope, oldest, enough)
                if found.length:
                    return found
        return NO_MATCHES

    def _compare(
        self, context: Context, level: int, place: int, fingerprint: int, scope: int, oldest: int, enough: int
    ) -> Matches:
        """Return the longest matches of a chain from a place on."""
        tokens, scopes, links, newest = self._tokens, self._scopes, self._links[level], context.newest
        capacity, gram = self.capacity, self.grams[level]
        longest, num_places, places = 0, 0, list[int]()
        for _ in range(_MAX_VISITS):
            at = place % capacity
            link = links[at]
            if link >> _DISTANCE_BITS == fingerprint and (scopes is None or scopes[at] == scope):
                length = gram
                if at >= longest > gram and tokens[at - longest] != newest[longest - 1]:
                    length = 0  # shorter than the longest one
                elif at > gram < len(newest) and tokens[at - gram - 1] == newest[gram]:
                    length = self._match_length(context, at)
                if length > longest:
                    longest, places = length, []
                if length == longest:
                    places.append(place)
                num_places += 1
                if num_places == MAX_PLACES or (length == self._max_match and len(places) >= enough):
                    break
            distance = link & _DISTANCE_MASK
            place -= distance
            if not distance or place <= oldest:
                break
        return Matches(longest, places)

    def _match_length(self, context: Context, at: int) -> int:
        """Return the number of equal tokens before a position of the buffer and at the end of the context."""
        max_match = self._max_match
        window = min(at, max_match)
        before = int.from_bytes(self._bytes[4 * (at - window) : 4 * at], "little") << 32 * (
            max_match - window
        )
        num_equal = (32 * max_match - (before ^ context.bits).bit_length()) // 32
        return min(num_equal, window, len(context.newest))
