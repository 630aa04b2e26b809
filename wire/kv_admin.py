"""What an operator asks a core of KV memory, by way of a frontend, and what it keeps for him.

A *prefix* is named by the digest of its last full block (`quintet.core.kv.prefix`), in hexadecimal; the beginning of that name
is enough where no other prefix has it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quintet.wire.messages import Failed

Verb = Literal["list", "pin", "unpin", "evict", "export", "import"]

MIN_NAME, MAX_NAME = 8, 64
"""Digits of a prefix's name that must be given, and that there are."""
DIGEST_BYTES = 32
MAX_LISTED = 1000
MAX_LISTED_TOKENS = 1 << 20
"""Of all listed prefixes whose tokens are asked for; those of the others are left out."""


class KvQuery(msgspec.Struct, array_like=True, tag="kv_query"):
    """Frontend -> core: one of these verbs about the prefix with this name, or with these tokens."""

    query_id: int
    frontend: int
    verb: Verb
    name: str = ""
    token_ids: bytes = b""
    """int32; of a prefix that is given so, in place of a name."""
    salt: str = ""
    """Its ``cache_salt``."""
    limit: int = 0
    """Prefixes to list at most, those used last first."""
    with_tokens: bool = False
    file: str = ""
    """Name of the file to export into or to import."""


class KvPrefix(msgspec.Struct, array_like=True, gc=False):
    """One prefix: what a request could begin behind, and where it is."""

    digest: bytes
    num_tokens: int
    device: int
    """Blocks of it in KV memory."""
    host: int
    disk: int
    is_pinned: bool
    idle_ns: int | None
    """Since it was last used; None: not under this core."""
    token_ids: bytes = b""
    """int32; empty where they were not asked for, or are not known."""


class KvUsage(msgspec.Struct, array_like=True, gc=False):
    """An engine's KV memory, in blocks."""

    block_bytes: int
    block_size: int
    """Tokens."""
    num_blocks: int
    num_known: int
    """Blocks that the prefix cache can find."""
    num_pinned: int
    most_pinned: int
    num_places: int
    """On disk."""
    num_on_disk: int


class KvReport(msgspec.Struct, array_like=True, tag="kv_report"):
    """Core -> frontend: the answer, or an error."""

    query_id: int
    core: int
    prefixes: list[KvPrefix] = []
    """Those listed; or the one that was pinned, not pinned any more, or evicted, as it was."""
    num_prefixes: int = 0
    """How many there are, listed or not."""
    num_bytes: int = 0
    """Of a file that was written."""
    num_imported: int = 0
    """Blocks that a file brought."""
    num_known: int = 0
    """Blocks of it that were on disk already."""
    num_damaged: int = 0
    """Blocks of it that could not be stored."""
    room: KvUsage | None = None
    error: Failed | None = None


class KvPin(msgspec.Struct, array_like=True, gc=False):
    """A pinned prefix."""

    digest: bytes
    num_tokens: int
    keys: list[bytes]


class KvPins(msgspec.Struct, array_like=True, tag="kv_pins", gc=False):
    """Core to executor: all pinned prefixes. And back, to a new core, before the capacity: so they outlive either of the two."""

    pins: list[KvPin]
