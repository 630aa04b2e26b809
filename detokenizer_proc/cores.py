"""The open requests of all cores: one `Steps` for each."""

from __future__ import annotations

from collections.abc import Iterable

from quintet.detokenizer_proc.rows import Steps
from quintet.detokenizer_proc.text_state import TextBuilder
from quintet.wire.messages import Text, Tokens


class Cores:
    """One `Steps` per core, created by its first message. A request belongs to the core with the newest attempt.

    Cores do not communicate. When a core opens a newer attempt at a request, this process drops the rows that the previous
    core still sends.
    """

    def __init__(self, first: Steps) -> None:
        self._first = first
        self._steps = {0: first}

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return sum(steps.num_open for steps in self._steps.values())

    def of(self, core: int) -> Steps:
        """Return the `Steps` of a core; create it if missing."""
        steps = self._steps.get(core)
        if steps is None:
            steps = self._steps[core] = self._first.clone_empty()
        return steps

    def apply(self, message: Tokens) -> list[tuple[TextBuilder, Text]]:
        """Apply one step's tokens; return the text for each frontend."""
        steps = self.of(message.core)
        moved = [opened.request_id for opened in message.opens if opened.attempt]
        if moved and steps.accept_core(message.core_epoch):
            for other in self._steps.values():
                if other is not steps:
                    other.release(moved)
        return steps.apply(message)

    def take_stop_hits(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return per core the requests that a stop string ended, as (request id, attempt). Cores without hits are omitted."""
        return [(core, hits) for core, steps in self._steps.items() if (hits := steps.take_stop_hits())]

    def abandon(self, request_ids: Iterable[int]) -> None:
        """Call `Steps.abandon` for every core."""
        ids = list(request_ids)
        for steps in self._steps.values():
            steps.abandon(ids)

    def forget_frontend(self, index: int, epoch_tag: int) -> None:
        """Call `Steps.forget_frontend` for every core."""
        for steps in self._steps.values():
            steps.forget_frontend(index, epoch_tag)

    def forget_core(self, core: int, epoch: int) -> None:
        """Drop the open requests of a core's process with this or an earlier epoch."""
        if core in self._steps:
            self._steps[core].accept_core(epoch + 1)
