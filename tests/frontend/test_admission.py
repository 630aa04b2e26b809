"""Admission control: limits on open choices and tokens, and Retry-After."""

from dataclasses import dataclass

import msgspec
import pytest

from quintet.frontend.admission import Admission
from quintet.frontend.load_balancing.load_ledger import LoadLedger
from quintet.frontend.load_balancing.workers import Workers
from quintet.frontend.streams import Mailbox, Stream
from quintet.wire.codec import pack_i32
from quintet.wire.config import FrontendConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import Role, WorkerId
from quintet.wire.messages import Submit, TokenPrompt
from quintet.wire.metrics import Metrics
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.supervision import ProcessSlot, SlotState, Topology
from tests.frontend.configs import make_config


def make_ledger() -> LoadLedger:
    config = make_config()
    model = msgspec.structs.replace(config.model, max_model_len=1000)
    return LoadLedger(
        Workers(WorkerId(Role.FRONTEND, 0, 1), "/nowhere"), msgspec.structs.replace(config, model=model)
    )


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def ready_ledger() -> LoadLedger:
    ledger = make_ledger()
    roles = (Role.TOKENIZER, Role.CORE, Role.EXECUTOR, Role.DETOKENIZER)
    ledger.workers.follow(
        Topology(1, [ProcessSlot(WorkerId(role, 0, 1), "", 1, SlotState.READY) for role in roles])
    )
    return ledger


def make_admission(
    ledger: LoadLedger, max_requests: int = 1000, max_tokens: int = 1 << 20, clock: Clock | None = None
) -> Admission:
    config = FrontendConfig(max_queued_requests=max_requests, max_queued_tokens=max_tokens)
    return Admission(ledger, config, Metrics(), clock or Clock())


def prompt(num_tokens: int) -> TokenPrompt:
    return TokenPrompt(pack_i32(range(num_tokens)))


def admit(admission: Admission, num_prompts: int = 1, num_tokens: int = 1, max_tokens: int = 1) -> None:
    admission.check([prompt(num_tokens)] * num_prompts, SamplingParams(max_tokens=max_tokens))


def rejection(
    admission: Admission, num_prompts: int = 1, num_tokens: int = 1, max_tokens: int = 1
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        admit(admission, num_prompts, num_tokens, max_tokens)
    return caught.value


def live(ledger: LoadLedger, num_prompt: int, max_tokens: int) -> Stream:
    """Add an open request with these tokens."""
    submit = Submit(1, prompt(num_prompt), RequestSpec(SamplingParams(max_tokens=max_tokens), 0, 0), 0, 0)
    stream = Stream(submit, Mailbox(), lambda _: None)
    ledger.open(stream)
    return stream


def test_the_bound_is_exact() -> None:
    ledger = ready_ledger()
    admission = make_admission(ledger, 3)
    ledger.num_open_choices = 2
    admit(admission)
    refused = rejection(admission, 2)
    assert refused.code is ErrorCode.OVERLOADED
    assert "the limit is 3" in refused.message
    ledger.num_open_choices = 3
    assert rejection(admission).code is ErrorCode.OVERLOADED


@pytest.mark.parametrize(
    ("ended", "seconds", "excess", "expected"),
    [(100, 2.0, 1, 1), (10, 2.0, 20, 4), (1, 4.0, 1, 4), (1, 4.0, 1000, 60), (0, 0.5, 1, 2), (0, 8.0, 1, 60)],
)
def test_retry_after_follows_the_completion_rate(
    ended: int, seconds: float, excess: int, expected: int
) -> None:
    ledger, clock = ready_ledger(), Clock()
    admission = make_admission(ledger, clock=clock)
    ledger.num_open_choices, ledger.num_ended = 1000, ended
    clock.now = seconds
    assert rejection(admission, excess).retry_s == expected


def test_requests_are_rejected_before_core_and_executor_are_ready() -> None:
    refused = rejection(make_admission(make_ledger(), 3))
    assert refused.code is ErrorCode.UNAVAILABLE
    assert "core and executor" in refused.message
    assert refused.retry_s >= 1


def test_requests_are_admitted_while_a_worker_is_replaced() -> None:
    ledger = ready_ledger()
    slots = [
        ProcessSlot(WorkerId(role, 0, 2), "", 1, SlotState.STARTING) for role in (Role.CORE, Role.EXECUTOR)
    ]
    ledger.workers.follow(Topology(2, slots))
    admit(make_admission(ledger, 3))


def test_new_frontend_admits_after_the_first_load() -> None:
    ledger = make_ledger()
    slots = [
        ProcessSlot(WorkerId(role, 0, 2), "", 1, SlotState.STARTING, was_ready=True)
        for role in (Role.CORE, Role.EXECUTOR)
    ]
    ledger.workers.follow(Topology(7, slots))
    admit(make_admission(ledger, 3))


def test_requests_are_rejected_while_draining() -> None:
    admission = make_admission(ready_ledger(), 3)
    admit(admission)
    admission.draining = True
    assert rejection(admission).code is ErrorCode.UNAVAILABLE


def test_request_beyond_the_limit_is_a_client_error() -> None:
    refused = rejection(make_admission(ready_ledger(), 3), 4)
    assert refused.code is ErrorCode.INVALID
    assert "at most 3" in refused.message


def test_token_limit_counts_prompts_and_outputs() -> None:
    ledger = ready_ledger()
    admission = make_admission(ledger, max_tokens=100)
    live(ledger, num_prompt=60, max_tokens=30)
    admit(admission, num_tokens=8, max_tokens=2)
    refused = rejection(admission, num_tokens=8, max_tokens=3)
    assert refused.code is ErrorCode.OVERLOADED
    assert (
        "90 prompt and output tokens are pending" in refused.message
        and "add about 11" in refused.message
        and "the limit is 100" in refused.message
    )


def test_prefilled_received_and_released_tokens_are_not_queued() -> None:
    ledger = ready_ledger()
    admission = make_admission(ledger, max_tokens=100)
    stream = live(ledger, num_prompt=60, max_tokens=40)
    rejection(admission)
    ledger.start(stream)
    admit(admission, num_tokens=50, max_tokens=10)
    rejection(admission, num_tokens=50, max_tokens=11)
    stream.choices[0].output_ids.extend(range(30))
    ledger.num_received = 30
    admit(admission, num_tokens=80, max_tokens=10)
    rejection(admission, num_tokens=80, max_tokens=11)
    ledger.close(stream)
    assert ledger.num_pending == 0


def test_lone_request_of_any_size_is_admitted() -> None:
    admit(make_admission(ready_ledger(), max_tokens=10), num_tokens=500, max_tokens=500)


def test_retry_after_follows_token_throughput() -> None:
    ledger, clock = ready_ledger(), Clock()
    admission = make_admission(ledger, max_tokens=1000, clock=clock)
    stream = live(ledger, num_prompt=500, max_tokens=500)
    ledger.start(stream)
    ledger.num_received = 100
    clock.now = 2.0  # 600 tokens left in two seconds
    assert ledger.num_pending == 400
    assert (
        rejection(admission, num_tokens=1000, max_tokens=500).retry_s == 2
    )  # the 400 queued tokens are the whole backlog
    assert rejection(admission, num_tokens=600, max_tokens=1).retry_s == 1


def test_unlimited_outputs_are_estimated_from_other_requests() -> None:
    ledger = make_ledger()
    open_ended = SamplingParams(max_tokens=None, n=2)
    assert ledger.cost(prompt(5), open_ended) == 5
    stream = live(ledger, 5, 400)
    stream.choices[0].output_ids.extend(range(40))
    ledger.close(stream)
    assert ledger.cost(prompt(5), open_ended) == 5 + 2 * 40
