"""Index of a token buffer by its grams: earlier places of the newest tokens, newest first.

A *place* is the position of the token after a gram. For each gram length (for example 1, 2, 4 and 8 tokens), places
with the same hash of their gram form a chain, newest first: the hash chains of DEFLATE (RFC 1951, section 4). A lookup
takes the longest gram with an earlier place, and compares up to `MAX_PLACES` places of that chain. So adding a token
and a lookup take constant time, whatever the length of the text.

The loops are compiled: ``csrc/cpu/ops/gram_index.cpp``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from quintet.executor.backends.cpu.ops.host_library import check_layout, declare, open_library
from quintet.wire.config import SpeculativeConfig
from quintet.wire.errors import ConfigError

Tokens = NDArray[np.int32]

MAX_PLACES = 8
"""Maximum places of a lookup, the newest ones. Places of other grams do not count."""

MAX_GRAMS = 8
"""Maximum number of gram lengths."""

MAX_GRAM = 8
"""Length of the longest grams of suffix decoding."""

ENTRY_BYTES = 8
"""Memory of a head or a link of a chain."""

_ADDRESS, _SIZE, _HASH = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64


class CGramIndex(ctypes.Structure):
    """Mirror of ``qt::GramIndex``."""

    _fields_ = (
        ("tokens", _ADDRESS),
        ("scopes", _ADDRESS),
        ("heads", _ADDRESS),
        ("links", _ADDRESS),
        ("capacity", _SIZE),
        ("max_match", _SIZE),
        ("shift", _SIZE),
        ("num_grams", _SIZE),
        ("grams", _SIZE * MAX_GRAMS),
    )


@dataclass(frozen=True, slots=True)
class _Functions:
    add: Callable[..., None]
    find: Callable[..., int]
    suffix_drafts: Callable[..., int]


@cache
def compiled_functions() -> _Functions:
    """Return the compiled functions. Raises `ConfigError` without compiled kernels."""
    library = open_library()
    if library is None:
        raise ConfigError(
            "--speculative-config needs the compiled kernels, which are not built: reinstall quintet with a C++ compiler, or"
            " drop the flag"
        )
    check_layout(library, "qt_gram_index_bytes", ctypes.sizeof(CGramIndex))
    return _Functions(
        declare(library, "qt_gram_add", _ADDRESS, _SIZE, _SIZE, _SIZE, _HASH, _SIZE),
        declare(
            *(library, "qt_gram_find", _ADDRESS, _ADDRESS, _SIZE, _HASH, _SIZE, _SIZE, _ADDRESS), result=_SIZE
        ),
        declare(
            *(library, "qt_suffix_drafts", _ADDRESS, _SIZE, _ADDRESS, _HASH, _SIZE, _ADDRESS, _SIZE),
            *(ctypes.c_double, _ADDRESS),
            result=_SIZE,
        ),
    )


def doubling(shortest: int, longest: int) -> tuple[int, ...]:
    """Return the gram lengths ``shortest``, twice that, and so on up to ``longest``."""
    lengths = [shortest]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return tuple(lengths)


def grams_of(config: SpeculativeConfig) -> tuple[int, ...]:
    """Return the gram lengths of prompt lookup or of suffix decoding."""
    if config.method == "suffix":
        return doubling(1, min(MAX_GRAM, config.suffix_decoding_max_tree_depth - 1))
    return doubling(config.prompt_lookup_min, config.prompt_lookup_max)


def index_bytes(capacity: int, num_grams: int) -> int:
    """Return the memory of an index of so many tokens, without the tokens: heads of all chains, and a link of each place."""
    return ENTRY_BYTES * num_grams * ((1 << _num_bits(capacity)) + capacity)


def _num_bits(capacity: int) -> int:
    return max(1, (capacity - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Matches:
    """Places after the longest match of a context, newest first."""

    length: int
    places: list[int]


class GramIndex:
    """Hash chains of the places in a buffer, which may be a ring: place ``p`` is at ``p % capacity``."""

    def __init__(
        self, tokens: Tokens, grams: Sequence[int], max_match: int, scopes: NDArray[np.uint64] | None = None
    ) -> None:
        """tokens: the buffer, contiguous, read only. grams: ascending lengths. max_match: maximum number of compared tokens.

        scopes: uint64 like ``tokens``: a lookup finds only places of its own scope. None: there is one scope.
        Raises `ConfigError` without compiled kernels.
        """
        functions = compiled_functions()
        self._add, self._find = functions.add, functions.find
        self.grams, self.capacity = tuple(grams), len(tokens)
        num_bits = _num_bits(self.capacity)
        heads = np.zeros((len(grams), 1 << num_bits), np.int64)
        links = np.zeros((len(grams), self.capacity), np.uint64)
        self.tokens, self._arrays = tokens, (tokens, scopes, heads, links)
        self.bytes_per_token = index_bytes(self.capacity, len(grams)) / self.capacity
        """Memory of a full index over its number of tokens, without the tokens."""
        self._index = CGramIndex(
            *(None if array is None else array.ctypes.data for array in self._arrays),
            *(self.capacity, max_match, 64 - num_bits, len(grams)),
            (_SIZE * MAX_GRAMS)(*grams),
        )
        self.address = ctypes.addressof(self._index)
        """Of the C struct."""
        self._found = (_SIZE * (1 + MAX_PLACES))()

    def add(self, begin: int, end: int, start: int, scope: int = 0, oldest: int = 0) -> None:
        """Add the places ``begin`` to ``end - 1`` of a text that starts at ``start``. No gram is longer than the text before it.

        The places must not wrap around the end of the buffer. oldest: places up to it are no longer valid.
        """
        self._add(self.address, begin, end, start, scope, oldest)

    def find(self, context: Tokens, scope: int = 0, oldest: int = 0, enough: int = MAX_PLACES) -> Matches:
        """Return the places after the longest match among the newest ones of the longest gram that occurs.

        context: int32[n], contiguous, the newest tokens. enough: number of matches of maximum length after which the
        search ends.
        """
        found, end = self._found, context.ctypes.data + context.nbytes
        num_places = self._find(self.address, end, len(context), scope, oldest, enough, found)
        return Matches(found[0], found[1 : 1 + num_places])


MIN_CAPACITY = 1024
"""Tokens of the smallest index. A request that outgrows its index gets one of twice its tokens."""


class RequestIndexes:
    """Earlier occurrences of a request's newest tokens in its own prompt and output."""

    def __init__(self, token_ids: Tokens, grams: Sequence[int], max_match: int) -> None:
        """token_ids: int32[slots, tokens]. grams, max_match: see `GramIndex`."""
        self._token_ids, self._grams, self._max_match = token_ids, grams, max_match
        self._indexes: dict[int, tuple[GramIndex, int]] = {}
        """Index of each slot, and the number of tokens in it."""

    def drop(self, slot: int) -> None:
        """Forget the request of a slot."""
        self._indexes.pop(slot, None)

    def updated(self, slot: int, num_tokens: int) -> GramIndex:
        """Return the index of a request with so many known tokens; it adds those since the last call."""
        index, num_added = self._indexes.get(slot, (None, 1))
        if index is None or num_tokens > index.capacity:
            capacity = min(self._token_ids.shape[1], max(MIN_CAPACITY, 2 * num_tokens))
            index, num_added = GramIndex(self._token_ids[slot, :capacity], self._grams, self._max_match), 1
        index.add(num_added, num_tokens, 0)
        self._indexes[slot] = index, num_tokens
        return index
