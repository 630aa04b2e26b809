"""Pool of KV blocks: reference counts, fences and LRU eviction.

              take                    release, last reference
      free ──────────▶ owned ───────────────────────┐
       ▲               ▲  ▲                         ▼
       │         share │  │ share                fenced   (steps in flight may still write it)
       │               │  └─────────────────────────┤
       │               │                            │ settle
       ├───────────────┼────── no known content ────┤
       │ take (evicts) │                            ▼
       └──────────── cached ◀── content known to the prefix cache

The fence is the newest step in flight at the last release. Known content may be read again at once, because its
writer was planned earlier. The block may not be overwritten before that step is committed.

An operator excludes pinned prefixes from eviction on the device and on disk. A pin may precede its blocks. The pool
adds a reference to each pinned block on the device, now or once it is computed. So pins survive the loss of an
executor's blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from quintet.core.kv.prefix import PrefixIndex
from quintet.core.kv.tiers import Tiers
from quintet.wire.kv_tiers import KvPin


@dataclass(slots=True)
class Pins:
    """All pins of one engine, in order of creation."""

    by_digest: dict[bytes, KvPin] = field(default_factory=dict)
    wanted: Counter[bytes] = field(default_factory=Counter)
    """Block key -> number of pins that contain it."""
    held: dict[bytes, int] = field(default_factory=dict)
    """Block key -> device block, for which the pool holds a reference."""

    def add(self, pin: KvPin) -> list[bytes]:
        """Add a new pin; return the keys that no pin contained before."""
        self.by_digest[pin.digest] = pin
        added = [key for key in pin.keys if key not in self.wanted]
        self.wanted.update(pin.keys)
        return added

    def remove(self, digest: bytes) -> list[bytes]:
        """Remove a pin; return the keys that no pin contains now."""
        left: list[bytes] = []
        for key in self.by_digest.pop(digest).keys:
            self.wanted[key] -= 1
            if not self.wanted[key]:
                del self.wanted[key]
                left.append(key)
        return left

    def num_more(self, pin: KvPin) -> int:
        """Return the number of the pin's blocks that are not pinned yet."""
        return sum(key not in self.wanted for key in pin.keys)


class BlockPool:
    """Reference counts and free lists over ``num_blocks`` blocks."""

    __slots__ = ("cached", "fenced", "free", "index", "num_blocks", "pins", "refs", "shared_fences", "tiers")

    def __init__(self, num_blocks: int, tiers: Tiers | None = None, pins: Pins | None = None) -> None:
        """pins: kept from a previous pool after its blocks were lost."""
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # its first entry is found in constant time
        """Unreferenced blocks with known content, least recently used first."""
        self.fenced: OrderedDict[int, int] = OrderedDict()
        """Unreferenced block -> the step it waits for, oldest first."""
        self.shared_fences: OrderedDict[int, int] = OrderedDict()
        """Referenced block -> the newest step in flight when another holder released it."""
        self.index = PrefixIndex()
        self.tiers = tiers or Tiers()
        self.pins = pins or Pins()
        self.pins.held.clear()
        self._update_pin_callback()
        for tier in self.tiers.all:
            tier.pinned = self.pins.wanted

    @property
    def num_available(self) -> int:
        """Number of blocks that `take` can return now."""
        return len(self.free) + len(self.cached)

    @property
    def num_used(self) -> int:
        """Number of blocks that requests hold or that are fenced."""
        return self.num_blocks - len(self.free) - len(self.cached)

    def take(self) -> int:
        """Return one block with one reference, evicting the least recently used content if necessary."""
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            self.tiers.on_evict(self.index.forget(block), block)
        self.refs[block] = 1
        return block

    def pin(self, pin: KvPin) -> None:
        """Pin a prefix: its cached blocks, and further ones once they are computed."""
        for key in self.pins.add(pin):
            block = self.index.block_of.get(key)
            if block is not None:
                self._hold_pinned(key, block)
        self._update_pin_callback()

    def unpin(self, digest: bytes, fence: int | None) -> None:
        """Remove a pin. ``fence`` as in `release`."""
        left = self.pins.remove(digest)
        self.release([self.pins.held.pop(key) for key in left if key in self.pins.held], fence)
        self._update_pin_callback()

    def _update_pin_callback(self) -> None:
        self.index.on_register = self._hold_pinned if self.pins.wanted else None

    def _hold_pinned(self, key: bytes, block: int) -> None:
        if key in self.pins.wanted:
            self.share([block])
            self.pins.held[key] = block

    def evict(self, block: int) -> None:
        """Remove a block's content from the index while requests may hold it. It must not be pinned."""
        self.tiers.on_evict(self.index.forget(block), block)
        if block in self.cached:
            del self.cached[block]
            self.free.append(block)

    def may_move(self, block: int) -> bool:
        """Return True when the block's only holder may overwrite it: no other holder has it or may still read it.

        The holder's own steps run in order, so it needs no fence.
        """
        return self.refs[block] == 1 and block not in self.shared_fences

    def move(self, block: int) -> None:
        """Remove a block's content from the index, because its holder overwrites it."""
        assert self.may_move(block), (block, self.refs[block])
        if self.index.holds(block):
            self.tiers.on_evict(self.index.forget(block), block)

    def cost_of_sharing(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks sharing would remove from the available ones."""
        return sum(map(self.cached.__contains__, blocks))

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        refs = self.refs
        for block in blocks:
            if refs[block] == 0:
                fence = self.fenced.pop(block, None)
                if fence is None:
                    del self.cached[block]
                else:
                    self.shared_fences[block] = fence
            refs[block] += 1

    def release(self, blocks: list[int], fence: int | None) -> None:
        """Drop one reference from each block of a table, the tail first so that it is evicted before the head.

        ``fence`` is the newest step in flight, or None when there is none.
        """
        refs = self.refs
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if fence is None:
                    self._settle_block(block)
                else:
                    self.shared_fences.pop(block, None)
                    self.fenced[block] = fence
            elif fence is not None:
                self.shared_fences.pop(block, None)
                self.shared_fences[block] = fence

    def settle(self, step: int) -> None:
        """Lift the fences up to ``step``, which has been committed."""
        fenced = self.fenced
        while fenced and fenced[block := next(iter(fenced))] <= step:
            del fenced[block]
            self._settle_block(block)
        fences = self.shared_fences
        while fences and fences[block := next(iter(fences))] <= step:
            del fences[block]

    def _settle_block(self, block: int) -> None:
        if self.index.holds(block):
            self.cached[block] = None
        else:
            self.free.append(block)
