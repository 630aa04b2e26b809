"""Recovery of live requests from the loss of a worker, and moves off retiring and unready ones.

    dispatched ──▶ parked (a new attempt, if its core or detokenizer is lost) ──▶ dispatched

A request is resumable from its token ids: it is sent again with the output received so far.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from quintet.frontend.load_balancing.dispatcher import Dispatcher
from quintet.frontend.reconcile import MAX_TOKENIZER_DEATHS
from quintet.frontend.streams import Stream
from quintet.process.work_journal import REQUEST, WorkId
from quintet.wire.ids import Role, WorkerId
from quintet.wire.metrics import Metrics
from quintet.wire.supervision import SlotState, Topology


class LossRecovery:
    """Parks the requests of lost workers for a new dispatch."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._dispatcher, self._ledger, self._selector = dispatcher, dispatcher.ledger, dispatcher.selector
        self._workers = dispatcher.ledger.workers
        self._resumed = {
            role: metrics.counter("resumed_requests", "Requests resumed after the loss of a process.", role=str(role))
            for role in (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
        }  # fmt: skip

    def follow(self, topology: Topology, streams: Iterable[Stream]) -> list[Stream]:
        """Re-dispatch requests of lost workers. Returns the requests to end: cancelled ones, which no worker will end, and
        poison requests (`MAX_TOKENIZER_DEATHS`).
        """
        unended: list[Stream] = []
        lost = self._workers.follow(topology)
        for worker in lost:
            if worker.role in (Role.CORE, Role.EXECUTOR):
                self._selector.lose(worker)
                if worker.role is Role.CORE:
                    self._unpin(worker.index)
        retiring = self._retiring(topology)
        if lost or retiring:
            for stream in list(streams):
                if stream.tokenizer is not None and self._handle_loss(stream, lost, retiring):
                    unended.append(stream)
        self._move_off_unready_engines(streams)
        return unended

    def _move_off_unready_engines(self, streams: Iterable[Stream]) -> None:
        """Move requests off engines without a ready executor, once another engine is ready.

        They were sent there while no engine was ready, or their executor died at such a time.
        """
        waiting = self._workers.unready_engines()
        if not waiting or not self._workers.ready_engines():
            return
        for stream in list(streams):
            if stream.tokenizer is not None and stream.submit.core in waiting:
                self._move(stream)

    def _retiring(self, topology: Topology) -> frozenset[int]:
        """Return the detokenizers to drain, if there is another one."""
        if self._ledger.pick(Role.DETOKENIZER) is None:
            return frozenset()
        return frozenset(
            slot.worker.index
            for slot in topology.slots
            if slot.worker.role is Role.DETOKENIZER and slot.state is SlotState.RETIRING
        )

    def _handle_loss(self, stream: Stream, lost: list[WorkerId], retiring: frozenset[int]) -> bool:
        """Handle the loss of a request's worker. Returns whether the request ends here, because no worker will end it."""
        submit = stream.submit
        for worker in lost:
            match worker.role:
                case Role.CORE if worker.index == submit.core:
                    stream.pinned_core = None
                    return self._park(stream, Role.CORE)
                case Role.EXECUTOR if worker.index == submit.core and self._move(stream):
                    return False
                case Role.DETOKENIZER if worker.index == submit.spec.detokenizer:
                    return self.resume(stream, Role.DETOKENIZER)
        for worker in lost:
            if worker.role is Role.TOKENIZER and worker.index == stream.tokenizer:
                return self._lose_tokenizer(stream)
        if submit.spec.detokenizer in retiring and not stream.is_cancelled:
            return self.resume(stream, Role.DETOKENIZER)
        return False

    def _move(self, stream: Stream) -> bool:
        """Move a request off an engine with a lost or starting executor. False if it cannot move."""
        if stream.is_cancelled or not self._selector.can_leave(stream):
            return False
        stream.mark_suspect()
        self._dispatcher.send_cancel(stream, moved=True)
        stream.pinned_core = None
        self._park(stream, Role.EXECUTOR)
        return True

    def _unpin(self, engine: int) -> None:
        """Unpin parked requests from a lost engine."""
        for stream in self._dispatcher.parked:
            if stream.pinned_core == engine:
                stream.pinned_core = None

    def resume(self, stream: Stream, role: Role) -> bool:
        """Park a request to resume it at its engine; a cancelled one is dropped."""
        stream.pinned_core = stream.submit.core
        return self._park(stream, role)

    def _park(self, stream: Stream, role: Role) -> bool:
        if stream.is_cancelled:
            self._dispatcher.send_cancel(stream)
            return True
        self._resumed[role].inc()
        self._dispatcher.release(stream)
        stream.attempt += role is not Role.TOKENIZER  # of an equal attempt, the core drops the duplicate
        self._dispatcher.parked.append(stream)
        return False

    def _lose_tokenizer(self, stream: Stream) -> bool:
        """Resume at another tokenizer a request that the lost one may not have forwarded.

        Returns whether the request ends here.
        """
        was_passed_on = stream.attempt == 0 and stream.started is not None
        was_encoded = any(
            WorkId(REQUEST, choice.request_id) in self._workers.work_lost for choice in stream.choices
        )
        stream.num_tokenizer_deaths = stream.num_tokenizer_deaths + 1 if was_encoded else 0
        if stream.num_tokenizer_deaths >= MAX_TOKENIZER_DEATHS and not stream.is_cancelled:
            logging.getLogger("quintet").warning(
                "request %d rejected: it ended tokenizers", stream.request_id
            )
            return True
        if not was_passed_on and not stream.is_cancelled:
            return self.resume(stream, Role.TOKENIZER)
        replacement = self._ledger.pick(Role.TOKENIZER)
        if replacement is not None:
            self._ledger.end_encoding(stream)
            stream.tokenizer = replacement
        was_cancelled = (
            stream.is_cancelled and replacement is not None and self._dispatcher.send_cancel(stream)
        )
        return stream.is_cancelled and not (was_passed_on and was_cancelled)
