"""Prefixes that an operator wants kept: their contents are given away neither by the device nor by the disk.

A pin is a wish that outlasts what it is of. What the device has of it, it holds a reference to; what it has not, it gets one to
as soon as somebody has computed it. So it survives an executor whose blocks are lost, and a prefix may be pinned before it is
there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Pin:
    """A pinned prefix."""

    digest: bytes
    """Of its last block: its name."""
    num_tokens: int
    keys: tuple[bytes, ...]
    """The contents that a request needs which goes on behind it."""


@dataclass(slots=True)
class Pins:
    """All of one engine, in the order in which they were made."""

    by_digest: dict[bytes, Pin] = field(default_factory=dict)
    wanted: Counter[bytes] = field(default_factory=Counter)
    """Content -> how many pins are of it."""
    held: dict[bytes, int] = field(default_factory=dict)
    """Content -> the device block that has it, to which there is a reference."""

    def add(self, pin: Pin) -> list[bytes]:
        """Take a pin that is not there yet; return the contents that were not wanted before."""
        self.by_digest[pin.digest] = pin
        news = [key for key in pin.keys if key not in self.wanted]
        self.wanted.update(pin.keys)
        return news

    def remove(self, digest: bytes) -> list[bytes]:
        """Drop a pin; return the contents that nobody wants any more."""
        left: list[bytes] = []
        for key in self.by_digest.pop(digest).keys:
            self.wanted[key] -= 1
            if not self.wanted[key]:
                del self.wanted[key]
                left.append(key)
        return left

    def num_more(self, pin: Pin) -> int:
        """Return how many blocks a pin takes that are not pinned already."""
        return sum(key not in self.wanted for key in pin.keys)
