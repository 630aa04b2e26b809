"""Requests whose prompts are being encoded in lanes: in which attempt, and which of their choices were cancelled meanwhile."""

from __future__ import annotations

import msgspec

from quintet.wire.messages import Cancel, Submit


class OffloadedRequests:
    """The requests in lanes, each in its newest attempt."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Submit, set[int]]] = {}
        """By their first choice."""
        self._first: dict[int, int] = {}
        """Of every choice, that of its request."""

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._first

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, submit: Submit) -> None:
        """A request goes into a lane."""
        self._waiting[submit.request_id] = submit, set()
        for request_id in _choices(submit):
            self._first[request_id] = submit.request_id

    def leave(self, submit: Submit) -> set[int] | None:
        """A request leaves its lane: return the cancelled choices, or None where its frontend goes on with it elsewhere."""
        waiting = self._waiting.get(submit.request_id)
        if waiting is None or waiting[0] is not submit:
            return None
        self._forget(submit.request_id)
        return waiting[1]

    def cancel(self, cancel: Cancel) -> Cancel | None:
        """Note who is cancelled, and return what is to be passed on: cancelling what the core does not know yet waits for it."""
        rest, moved = [], set()
        for request_id in cancel.request_ids:
            first = self._first.get(request_id)
            if first is None:
                rest.append(request_id)
            elif cancel.moved:
                moved.add(first)
            else:
                self._waiting[first][1].add(request_id)
        for first in moved:
            self._forget(first)
        return msgspec.structs.replace(cancel, request_ids=rest) if rest else None

    def clear(self) -> None:
        """Forget all of them."""
        self._waiting.clear()
        self._first.clear()

    def _forget(self, first: int) -> None:
        submit, _ = self._waiting.pop(first)
        for request_id in _choices(submit):
            self._first.pop(request_id, None)


def _choices(submit: Submit) -> range:
    return range(submit.request_id, submit.request_id + submit.spec.params.n)
