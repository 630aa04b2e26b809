"""Requests with prompts in lanes: newest attempt, and choices cancelled meanwhile."""

from __future__ import annotations

import msgspec

from quintet.wire.messages import Cancel, Submit


class OffloadedRequests:
    """The requests in lanes, each with its newest attempt."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Submit, set[int]]] = {}
        """Request and cancelled choices, by the id of the first choice."""
        self._first: dict[int, int] = {}
        """Id of the first choice, by the id of any choice of the request."""

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._first

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, submit: Submit) -> None:
        """Record that a request enters a lane."""
        self._waiting[submit.request_id] = submit, set()
        for request_id in _choices(submit):
            self._first[request_id] = submit.request_id

    def remove(self, submit: Submit) -> set[int] | None:
        """Remove a request that left its lane; return its cancelled choices, or None if this attempt is superseded."""
        waiting = self._waiting.get(submit.request_id)
        if waiting is None or waiting[0] is not submit:
            return None
        self._forget(submit.request_id)
        return waiting[1]

    def cancel(self, cancel: Cancel) -> Cancel | None:
        """Record cancelled requests in lanes; return the rest of the message for the core, or None."""
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
        """Remove all requests."""
        self._waiting.clear()
        self._first.clear()

    def _forget(self, first: int) -> None:
        submit, _ = self._waiting.pop(first)
        for request_id in _choices(submit):
            self._first.pop(request_id, None)


def _choices(submit: Submit) -> range:
    return range(submit.request_id, submit.request_id + submit.spec.params.n)
