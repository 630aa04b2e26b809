"""Ring of pinned buffers for asynchronous copies between host and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.executor.backends.cuda.device import Device, Event


@dataclass(slots=True)
class PinnedBuffer:
    """Pinned memory, and the event after the last copy that used it."""

    host: torch.Tensor
    free_after: Event | None = None


class PinnedRing:
    """Pinned buffers of one size, reused in turn.

    `take` waits until the device has finished the last use of the buffer. With one more buffer than steps in flight it does not
    wait.
    """

    def __init__(self, device: Device, num_buffers: int, num_words: int) -> None:
        self._buffers = [PinnedBuffer(device.pinned((num_words,), torch.int32)) for _ in range(num_buffers)]
        self._next = 0

    def take(self) -> PinnedBuffer:
        """Return the least recently used buffer; the caller sets ``free_after``."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.free_after is not None:
            buffer.free_after.wait()
            buffer.free_after = None
        return buffer
