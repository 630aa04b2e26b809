"""Queue of KV events for external routers (`quintet.wire.kv_events`): blocks stored and removed.

With several groups of layers, events cover one group: full attention if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from quintet.core.kv.groups import Groups
from quintet.core.kv.prefix import DIGEST_BYTES, key_of, salt_digest
from quintet.core.requests.request import Request
from quintet.wire.kv_events import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from quintet.wire.model_files import AdapterConfig

_HASH_BYTES = 8
_NO_SALT = salt_digest("")


class KvEvents:
    """Collects events in order until `take` is called. Starts with `AllBlocksCleared`."""

    def __init__(self, groups: Groups, adapters: Sequence[AdapterConfig] = ()) -> None:
        """At least one group must hold tokens."""
        self._adapter_names = {adapter.digest: adapter.name for adapter in adapters}
        full = [index for index in groups.tokens if groups.all[index].kind == "full"]
        self.group = (full or groups.tokens)[0]
        self._block_size = groups.spec.block_size
        self._events: list[KvEvent] = [AllBlocksCleared()]
        self._reported: set[bytes] = set()

    def stored(self, request: Request, first: int, end: int) -> None:
        """Record a request's blocks ``first`` to ``end`` (exclusive) as stored, if the request holds them."""
        first = max(first, request.kv.held[self.group].begin)
        digests = request.kv.digests[first:end]
        keys = [key_of(digest, self.group) for digest in digests]
        if not keys or self._reported.issuperset(keys):
            return
        self._reported.update(keys)
        size = self._block_size
        self._events.append(
            BlockStored(
                block_hashes=[_hash_of(digest) for digest in digests],
                parent_block_hash=_hash_of(request.kv.digests[first - 1]) if first else None,
                token_ids=request.tokens[first * size : end * size],
                block_size=size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=self._adapter_names.get(request.spec.adapter),
                extra_keys=_extra_keys(request, range(first, first + len(keys)), size),
            )
        )

    def removed(self, key: bytes) -> None:
        """Record that a content left the device, if it was reported before."""
        if key in self._reported:
            self._reported.remove(key)
            self._events.append(BlockRemoved([_hash_of(key[:DIGEST_BYTES])], MEDIUM))

    def take(self) -> list[KvEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def _extra_keys(request: Request, blocks: range, size: int) -> list[list[str]] | None:
    """Return what identifies each block besides its tokens: the salt with the adapter, and the spans of embeddings in it."""
    salt = [] if request.salt_digest == _NO_SALT else [request.salt_digest.hex()]
    keys = [
        salt
        + [
            span.digest.hex()
            for span in request.embeds
            if span.start < (at + 1) * size and at * size < span.end
        ]
        for at in blocks
    ]
    return keys if any(keys) else None


def _hash_of(digest: bytes) -> int:
    return int.from_bytes(digest[-_HASH_BYTES:], "big")
