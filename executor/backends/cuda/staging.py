"""Small numbers on their way between host and device: pinned buffers, taken in turn, that copies use in their own time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.device import Device, Event


@dataclass(slots=True)
class PinnedBuffer:
    """Page-locked memory, and the mark behind the last copy that used it."""

    host: torch.Tensor
    free_after: Event | None = None


class PinnedRing:
    """Buffers of one size. Whoever takes one waits, if he must, until the device is done with what it was last used for.

    With one buffer more than there are steps in flight nobody ever waits.
    """

    def __init__(self, device: Device, num_buffers: int, num_words: int) -> None:
        self._buffers = [PinnedBuffer(device.pinned((num_words,), torch.int32)) for _ in range(num_buffers)]
        self._next = 0

    def take(self) -> PinnedBuffer:
        """Return the buffer that was taken longest ago; its user sets ``free_after``."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.free_after is not None:
            buffer.free_after.wait()
            buffer.free_after = None
        return buffer
