"""Admin messages about KV memory: queries of an operator through a frontend, and reports.

A *prefix* is named by the digest of its last full block (`quintet.core.kv.prefix`), in hexadecimal; a unique
beginning of that name suffices.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quintet.wire.messages import Failed

Verb = Literal["list", "pin", "unpin", "evict", "export", "import"]

MIN_NAME, MAX_NAME = 8, 64
"""Minimum and maximum hexadecimal digits of a prefix name."""
DIGEST_BYTES = 32
MAX_LISTED = 1000
MAX_LISTED_TOKENS = 1 << 20
"""Maximum total of listed tokens; further prefixes are listed without tokens."""


class KvQuery(msgspec.Struct, array_like=True, tag="kv_query"):
    """Frontend -> core: an operation on the prefix with this name or these tokens."""

    query_id: int
    frontend: int
    verb: Verb
    name: str = ""
    token_ids: bytes = b""
    """int32; identifies the prefix instead of a name."""
    salt: str = ""
    """The ``cache_salt`` of the prefix."""
    limit: int = 0
    """Maximum number of prefixes to list, most recently used first."""
    with_tokens: bool = False
    file: str = ""
    """Name of the file to export into or to import."""


class KvPrefix(msgspec.Struct, array_like=True, gc=False):
    """One cached prefix and its locations."""

    digest: bytes
    num_tokens: int
    device: int
    """Its blocks in KV memory."""
    host: int
    disk: int
    is_pinned: bool
    idle_ns: int | None
    """Time since its last use; None: unused under this core."""
    token_ids: bytes = b""
    """int32; empty where not requested or unknown."""


class KvUsage(msgspec.Struct, array_like=True, gc=False):
    """KV memory use of an engine, in blocks."""

    block_bytes: int
    block_size: int
    """Tokens per block."""
    num_blocks: int
    num_known: int
    """Blocks in the prefix cache."""
    num_pinned: int
    most_pinned: int
    num_places: int
    """Blocks that the disk can hold."""
    num_on_disk: int


class KvReport(msgspec.Struct, array_like=True, tag="kv_report"):
    """Core -> frontend: the result, or an error."""

    query_id: int
    core: int
    prefixes: list[KvPrefix] = []
    """The listed prefixes; or the state of the one that was pinned, unpinned or evicted."""
    num_prefixes: int = 0
    """Total number of prefixes, listed or not."""
    num_bytes: int = 0
    """Size of an exported file."""
    num_imported: int = 0
    """Blocks imported from a file."""
    num_known: int = 0
    """Blocks of it that were on disk already."""
    num_damaged: int = 0
    """Blocks of it that could not be stored."""
    usage: KvUsage | None = None
    error: Failed | None = None
