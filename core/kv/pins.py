"""Pinned prefixes: an operator excludes them from eviction on the device and on disk.

A pin may precede its blocks. The pool adds a reference to each pinned block on the device, now or once it is
computed. So pins survive the loss of an executor's blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Pin:
    """A pinned prefix."""

    digest: bytes
    """Digest of its last block, which names the pin."""
    num_tokens: int
    keys: tuple[bytes, ...]
    """Block keys that a request needs to continue after the prefix."""


@dataclass(slots=True)
class Pins:
    """All pins of one engine, in order of creation."""

    by_digest: dict[bytes, Pin] = field(default_factory=dict)
    wanted: Counter[bytes] = field(default_factory=Counter)
    """Block key -> number of pins that contain it."""
    held: dict[bytes, int] = field(default_factory=dict)
    """Block key -> device block, for which the pool holds a reference."""

    def add(self, pin: Pin) -> list[bytes]:
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

    def num_more(self, pin: Pin) -> int:
        """Return the number of the pin's blocks that are not pinned yet."""
        return sum(key not in self.wanted for key in pin.keys)
