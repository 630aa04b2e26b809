"""A recording in the place of a process's sockets: gives what was received, and compares what is sent.

Knows nothing of the process that is played to.
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
    """Everything was played; unwinds the loop of the process, as `Stopping` does."""


@dataclass(slots=True)
class ReplayAccount:
    """How far a replay came, and what it found."""

    num_turns: int = 0
    num_received: int = 0
    num_sent: int = 0
    """Frames that were sent again as they had been."""
    difference: str | None = None
    """The first; None when all was equal."""


class Playback:
    """The recorded inbox, outboxes and clock of one process.

    In order (``in_order``), each turn must send what it sent, frame by frame. Otherwise only the whole counts: for a
    process with threads, whose answers overtake each other.
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
        """A recording has no descriptor."""
        raise NotImplementedError("a recording is played by calling `wait`")

    def wait(self, timeout_s: float) -> list[object]:
        """Settle the turn that ends, and return the messages of the next. Raises `EndOfRecording`."""
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
        """Return the next turn's messages."""
        return self.wait(0.0)

    def hang(self, bell: Wakeup) -> None:
        """What the bell led to then is among the frames; what it does now does not count."""

    def clock(self) -> int:
        """Return when the turn began, then."""
        return self._now_ns

    # --- as a bus ---

    def open_outbox(self, worker: WorkerId, address: str) -> Outbox:
        """Return an outbox whose frames are compared with those recorded."""
        return _Noted(worker, None if worker.role is Role.SUPERVISOR else self._sent)

    def close(self) -> None:
        """Nothing is open."""

    # --- comparing ---

    def finish(self) -> ReplayAccount:
        """Settle the last turn, once the process has left its loop, and return what was found."""
        self._settle(is_last=True)
        if not self._in_order:
            self._settle_whole()
        return self.account

    def _settle(self, *, is_last: bool) -> None:
        """Compare what was sent in the turn with what was sent then."""
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
            self._differ(f"turn {turn.number}: {_name(missing)} was sent, and is not sent now")
        elif len(sent) > len(turn.sent) and not is_last:  # the last turn may have been cut off
            self._differ(f"turn {turn.number}: {_name(sent[len(turn.sent)])} is sent, and was not then")

    def _compare(self, turn: LoopIteration, position: int, before: Sent, after: Sent) -> None:
        where = f"turn {turn.number}, frame {position + 1} to {before.role}-{before.index}"
        if (before.role, before.index) != (after.role, after.index):
            self._differ(f"{where}: {_name(after)} is sent instead of {_name(before)}")
            return
        found = difference(before.payload, after.payload)
        if found is None:
            self.account.num_sent += 1
        else:
            self._differ(f"{where}: {found}")

    def _settle_whole(self) -> None:
        left = Counter((each.role, each.index, without_times(each.payload)) for each in self._replayed_whole)
        for number, each in self._recorded_whole:
            key = (each.role, each.index, without_times(each.payload))
            if left[key]:
                left[key] -= 1
                self.account.num_sent += 1
            else:
                self._differ(
                    f"turn {number}: {_name(each)} was sent, and is not sent now: {decoded(each.payload)!r}"
                )

    def _differ(self, words: str) -> None:
        if self.account.difference is None:
            self.account.difference = words


class _Noted:
    """An outbox into a list; those to the supervisor lead nowhere."""

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
    """Return the turns; of a recording that has lost its beginning, those from when nothing was pending."""
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
