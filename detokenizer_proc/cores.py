"""What each core has open here: a request is one core's at a time, that of the newest attempt.

Cores know nothing of each other. Only where two of them speak of one request does this process decide between them: whoever
opens a newer attempt has it, and what the other still sends of it is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from quintet.detokenizer_proc.rows import Steps
from quintet.detokenizer_proc.text_builder import TextBuilder
from quintet.wire.messages import Text, Tokens


class Cores:
    """One `Steps` for each core that ever sent something."""

    def __init__(self, first: Steps) -> None:
        self._first = first
        self._steps = {0: first}

    @property
    def num_open(self) -> int:
        """Requests that have begun and not ended."""
        return sum(steps.num_open for steps in self._steps.values())

    def of(self, core: int) -> Steps:
        """Return what a core has open."""
        steps = self._steps.get(core)
        if steps is None:
            steps = self._steps[core] = self._first.sibling()
        return steps

    def apply(self, message: Tokens) -> list[tuple[TextBuilder, Text]]:
        """Take one step's tokens; return what each frontend must be told."""
        steps = self.of(message.core)
        moved = [opened.request_id for opened in message.opens if opened.attempt]
        if moved and steps.meet_core(message.core_epoch):
            for other in self._steps.values():
                if other is not steps:
                    other.release(moved)
        return steps.apply(message)

    def take_stop_hits(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return, for each core that must hear of some, the requests that ended in their text, and at which attempt."""
        return [(core, hits) for core, steps in self._steps.items() if (hits := steps.take_stop_hits())]

    def abandon(self, request_ids: Iterable[int]) -> None:
        """See `Steps.abandon`, wherever the requests are open."""
        ids = list(request_ids)
        for steps in self._steps.values():
            steps.abandon(ids)

    def forget_frontend(self, index: int, epoch_tag: int) -> None:
        """See `Steps.forget_frontend`."""
        for steps in self._steps.values():
            steps.forget_frontend(index, epoch_tag)

    def forget_core(self, core: int, epoch: int) -> None:
        """Drop what this process of a core, and those before it, had open: there is another, or none any more."""
        if core in self._steps:
            self._steps[core].meet_core(epoch + 1)
