"""Recording as a replacement of a process's sockets: returns the recorded input, and compares the output.

Independent of the process role.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from quintet.deploy.tools.replay.compare import decoded, difference, without_times
from quintet.process.record import LoopIteration, Recording, Sent
from quintet.process.sockets import Outbox, Rejection
from quintet.process.wakeup import Wakeup
from quintet.wire.ids import Role, WorkerId


class EndOfRecording(BaseException):
    """The recording has ended; unwinds the loop of the process, like `Stopping`."""


@dataclass(slots=True)
class ReplayAccount:
    num_turns: int = 0
    num_received: int = 0
    num_sent: int = 0
    """Number of frames equal to the recording."""
    difference: str | None = None
    """First difference; None if all output is equal."""


class Playback:
    """The recorded inbox, outboxes and clock of one process.

    With ``in_order``, each loop iteration must send the recorded frames in order. Otherwise all frames are compared as a
    multiset, for processes with threads that reorder replies.
    """

    def __init__(self, recording: Recording, *, in_order: bool = True) -> None:
        self._turns = _from_idle(recording)
        self._in_order = in_order
        self._turn: LoopIteration | None = None
        self._now_ns = 0
        self._sent: list[Sent] = []
        self._recorded_whole: list[tuple[int, Sent]] = []
        self._replayed_whole: list[Sent] = []
        self.account = ReplayAccount()
        self.rejected = dict.fromkeys(Rejection, 0)

    # --- as an inbox and a clock ---

    def fileno(self) -> int:
        """Not supported: a recording has no descriptor."""
        raise NotImplementedError("a recording has no descriptor; call `wait`")

    def wait(self, timeout_s: float) -> list[object]:
        """Compare the finished iteration, and return the messages of the next. Raises `EndOfRecording`."""
        turn = next(self._turns, None)
        if turn is None:
            raise EndOfRecording
        self._settle(is_last=False)
        self._turn = turn
        self._now_ns = turn.now_ns
        self.account.num_turns += 1
        self.account.num_received += len(turn.frames)
        return [decoded(payload) for payload in turn.frames]

    def drain(self) -> list[object]:
        """Return the messages of the next iteration."""
        return self.wait(0.0)

    def add_wakeup(self, wakeup: Wakeup) -> None:
        """Ignore the wakeup: its effects are among the recorded frames."""

    def clock(self) -> int:
        """Return the recorded start time of the iteration."""
        return self._now_ns

    # --- as a bus ---

    def open_outbox(self, worker: WorkerId, address: str) -> Outbox:
        """Return an outbox that compares frames with the recording."""
        return _RecordedOutbox(worker, None if worker.role is Role.SUPERVISOR else self._sent)

    def close(self) -> None: ...

    # --- comparing ---

    def finish(self) -> ReplayAccount:
        """Compare the last iteration after the process has left its loop, and return the result."""
        self._settle(is_last=True)
        if not self._in_order:
            self._settle_whole()
        return self.account

    def _settle(self, *, is_last: bool) -> None:
        """Compare the frames sent in the iteration with the recording."""
        turn = self._turn
        sent = self._sent.copy()
        self._sent.clear()
        if turn is None:
            return
        if not self._in_order:
            self._recorded_whole += ((turn.number, each) for each in turn.sent)
            self._replayed_whole += sent
            return
        for position, (before, after) in enumerate(zip(turn.sent, sent, strict=False)):
            self._compare(turn, position, before, after)
        if len(sent) < len(turn.sent):
            missing = turn.sent[len(sent)]
            self._differ(f"turn {turn.number}: recorded {_name(missing)} was not sent")
        elif len(sent) > len(turn.sent) and not is_last:  # the recording may end within the last iteration
            self._differ(f"turn {turn.number}: {_name(sent[len(turn.sent)])} was sent, but not recorded")

    def _compare(self, turn: LoopIteration, position: int, before: Sent, after: Sent) -> None:
        location = f"turn {turn.number}, frame {position + 1} to {before.role}-{before.index}"
        if (before.role, before.index) != (after.role, after.index):
            self._differ(f"{location}: {_name(after)} was sent instead of {_name(before)}")
            return
        found = difference(before.payload, after.payload)
        if found is None:
            self.account.num_sent += 1
        else:
            self._differ(f"{location}: {found}")

    def _settle_whole(self) -> None:
        left = Counter((each.role, each.index, without_times(each.payload)) for each in self._replayed_whole)
        for number, each in self._recorded_whole:
            key = (each.role, each.index, without_times(each.payload))
            if left[key]:
                left[key] -= 1
                self.account.num_sent += 1
            else:
                self._differ(f"turn {number}: recorded {_name(each)} was not sent: {decoded(each.payload)!r}")

    def _differ(self, description: str) -> None:
        if self.account.difference is None:
            self.account.difference = description


class _RecordedOutbox:
    """Outbox that appends to a list, or discards frames to the supervisor."""

    def __init__(self, worker: WorkerId, sent: list[Sent] | None) -> None:
        self._worker = worker
        self._sent = sent

    def send(self, payload: bytes) -> None:
        if self._sent is not None:
            self._sent.append(Sent(self._worker.role, self._worker.index, payload))

    def close(self, *, drop: bool) -> None:
        pass


def _name(sent: Sent) -> str:
    return f"{type(decoded(sent.payload)).__name__} to {sent.role}-{sent.index}"


def _from_idle(recording: Recording) -> Iterator[LoopIteration]:
    """Yield the iterations; without the start of the recording, those after the first idle moment."""
    turns = recording.turns()
    if recording.is_whole:
        yield from turns
        return
    if recording.header.topology:
        yield LoopIteration(0, 0, True, [recording.header.topology])
    is_playing = False
    for turn in turns:
        is_playing = is_playing or turn.was_idle
        if is_playing:
            yield turn
