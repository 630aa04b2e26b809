"""Who is let in, and when those who are not should come back."""

from dataclasses import dataclass, field

import pytest

from quintet.frontend.admission import Admission
from quintet.frontend.dialects.errors import RetryLater
from quintet.frontend.router import Seats
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Seat, SeatState, Topology
from quintet.wire.metrics import Metrics


@dataclass
class Load:
    """As much of the sessions as the door looks at."""

    num_open_choices: int = 0
    num_ended: int = 0
    seats: Seats = field(default_factory=lambda: Seats(WorkerId(Role.FRONTEND, 0, 1)))


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def ready_load() -> Load:
    load = Load()
    roles = (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
    load.seats.follow(Topology(1, [Seat(WorkerId(role, 0, 1), "", 1, SeatState.READY) for role in roles]))
    return load


def refusal(admission: Admission, count: int = 1) -> RetryLater:
    with pytest.raises(RetryLater) as caught:
        admission.enter(count)
    return caught.value


def test_the_bound_is_exact() -> None:
    load = ready_load()
    admission = Admission(load, 3, Metrics(), Clock())
    load.num_open_choices = 2
    admission.enter()
    refused = refusal(admission, 2)
    assert refused.code is ErrorCode.OVERLOADED
    assert "at most 3" in refused.message
    load.num_open_choices = 3
    assert refusal(admission).code is ErrorCode.OVERLOADED


@pytest.mark.parametrize(
    ("ended", "seconds", "excess", "expected"),
    [(100, 2.0, 1, 1), (10, 2.0, 20, 4), (1, 4.0, 1, 4), (1, 4.0, 1000, 60), (0, 0.5, 1, 2), (0, 8.0, 1, 60)],
)
def test_retry_after_follows_the_completion_rate(
    ended: int, seconds: float, excess: int, expected: int
) -> None:
    load, clock = ready_load(), Clock()
    admission = Admission(load, 1000, Metrics(), clock)
    load.num_open_choices, load.num_ended = 1000, ended
    clock.now = seconds
    assert refusal(admission, excess).after_s == expected


def test_nobody_enters_before_there_is_a_core_and_an_executor() -> None:
    load = Load()
    refused = refusal(Admission(load, 3, Metrics(), Clock()))
    assert refused.code is ErrorCode.UNAVAILABLE
    assert "core and executor" in refused.message
    assert refused.after_s >= 1


def test_a_worker_that_is_being_replaced_is_no_reason_to_refuse() -> None:
    load = ready_load()
    seats = [Seat(WorkerId(role, 0, 2), "", 1, SeatState.STARTING) for role in (Role.CORE, Role.EXECUTOR)]
    load.seats.follow(Topology(2, seats))
    Admission(load, 3, Metrics(), Clock()).enter()


def test_nobody_enters_while_draining() -> None:
    admission = Admission(ready_load(), 3, Metrics(), Clock())
    admission.enter()
    admission.draining = True
    assert refusal(admission).code is ErrorCode.UNAVAILABLE


def test_more_than_could_ever_be_held_is_a_mistake() -> None:
    with pytest.raises(RequestError) as caught:
        Admission(ready_load(), 3, Metrics(), Clock()).enter(4)
    assert caught.value.code is ErrorCode.INVALID
    assert "at most 3" in caught.value.message
