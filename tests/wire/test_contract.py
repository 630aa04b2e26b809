"""Wire contract: every message survives encoding, and invalid parameters are named."""

import dataclasses
from typing import Any

import msgspec
import pytest

from quintet.wire import codec, messages, step, supervision
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.ids import RequestIds, Role, WorkerId, epoch_tag, frontend_of
from quintet.wire.metrics import Metrics, decode_snapshot
from quintet.wire.params import OutputKind, SamplingParams, seed_of_choice
from quintet.wire.request import RequestSpec


def test_tokens_cross_the_wire_unchanged() -> None:
    tokens = messages.Tokens(
        step=7,
        sent_ns=1,
        opens=[],
        request_ids=codec.pack_i64([1 << 62, 5]),
        first_indexes=codec.pack_i32([0, 9]),
        num_tokens=codec.pack_u8([1, 2]),
        token_ids=codec.pack_i32([3, 4, 5]),
        finishes=codec.pack_u8([0, 1]),
        named_stops=codec.pack_i32([1]),
    )
    received = msgspec.msgpack.decode(codec.encode(tokens), type=messages.Tokens | step.StepResult)
    assert received == tokens
    assert list(codec.unpack_i64(received.request_ids)) == [1 << 62, 5]
    assert list(codec.unpack_i32(received.named_stops)) == [1]


def test_prompt_kinds_are_distinguished_by_tag() -> None:
    for prompt in (messages.TextPrompt("a"), messages.TokenPrompt(b""), messages.ChatPrompt(b"[]")):
        submit = messages.Submit(
            1, prompt, RequestSpec(SamplingParams(seed=1, stop=["x"], logit_bias={3: 1.5}), 0, 0), 0, 0
        )
        assert msgspec.msgpack.decode(codec.encode(submit), type=messages.Submit) == submit


def test_every_tag_is_unique() -> None:
    tags = [
        member.__struct_config__.tag
        for module in (messages, step, supervision)
        for member in vars(module).values()
        if isinstance(member, type)
        and issubclass(member, msgspec.Struct)
        and member.__module__ == module.__name__
    ]
    used = [tag for tag in tags if tag is not None]
    assert len(used) == len(set(used))


def test_request_ids_name_their_frontend() -> None:
    ids = RequestIds(index=3, epoch=8195)
    first = ids.take(4)
    second = ids.take()
    assert second == first + 4
    assert frontend_of(first) == (3, epoch_tag(8195)) == (3, 3)
    assert first < 1 << 63


def test_worker_ids_read_like_addresses() -> None:
    assert str(WorkerId(Role.CORE, 0, 3)) == "core-0.3"


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"temperature": 2.5}, "temperature", "between 0 and 2"),
        ({"temperature": float("nan")}, "temperature", "between 0 and 2"),
        ({"top_p": 0.0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "0 or -1"),
        ({"n": 0}, "n", "between 1"),
        ({"n": 2, "temperature": 0.0}, "n", "1 when temperature is 0"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"min_tokens": 17}, "min_tokens", "at most max_tokens"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        ({"logit_bias": {99: 1.0}}, "logit_bias", "between 0 and 98"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "non-empty"),
        ({"seed": 1 << 63}, "seed", "64-bit"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty", "finite"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty", "finite"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty", "between 0.001 and 1000"),
        ({"max_tokens": 1 << 31}, "max_tokens", "at most 2147483647"),
        ({"max_tokens": None, "min_tokens": 1 << 64}, "min_tokens", "at most 2147483647"),
        ({"top_k": 1 << 64}, "top_k", "at most 2147483647"),
        ({"top_k": 10**5000}, "top_k", "too many digits to show"),
        ({"truncate_prompt_tokens": 1 << 64}, "truncate_prompt_tokens", "at most 2147483647"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"stop": ["x" * 4097]}, "stop", "at most 4096 characters"),
        ({"bad_words": ["ok", "x" * 1025]}, "bad_words", "at most 1024 characters"),
        ({"bad_words": ["\ud800", ""]}, "bad_words", "non-empty"),
        ({"stop_token_ids": [1] * 100}, "stop_token_ids", "at most 99 ids"),
        ({"allowed_token_ids": [1] * 100}, "allowed_token_ids", "at most 99 ids"),
    ],
)
def test_invalid_parameters_are_named_with_their_range(
    change: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**change).checked(vocab_size=99)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.param == param
    assert message in caught.value.message
    assert len(caught.value.message.encode()) < 300


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_limited_by_the_vocabulary(field: str) -> None:
    """For any --max-logprobs: the tokenizer's inbox would drop the request."""
    with pytest.raises(RequestError, match=f"{field} is 9; it must be between 0 and 8 .the vocabulary size"):
        SamplingParams(**{field: 9}).checked(max_logprobs=20, vocab_size=8)
    with pytest.raises(RequestError, match=f"{field} is 9; it must be between 0 and 8 .the vocabulary size"):
        SamplingParams(**{field: 9}).checked(max_logprobs=None, vocab_size=8)
    SamplingParams(**{field: 8}).checked(max_logprobs=20, vocab_size=8)
    for most in (8, 20, None):
        assert getattr(SamplingParams(**{field: -1}).checked(max_logprobs=most, vocab_size=8), field) == 8
    with pytest.raises(RequestError, match="between 0 and 7"):
        SamplingParams(**{field: -1}).checked(max_logprobs=7, vocab_size=8)


@pytest.mark.parametrize(
    "change", [{"top_k": -1}, {"truncate_prompt_tokens": -1}, {"max_tokens": (1 << 31) - 1}]
)
def test_range_limits_are_allowed(change: dict[str, Any]) -> None:
    SamplingParams(**change).checked()


def test_greedy_parameters_are_normalized() -> None:
    checked = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.1, seed=-1).checked()
    assert checked.greedy
    assert (checked.temperature, checked.top_p, checked.top_k, checked.min_p, checked.seed) == (
        0.0,
        1.0,
        0,
        0.0,
        None,
    )
    assert SamplingParams(temperature=0.001).checked().temperature == 0.01
    assert SamplingParams(logit_bias={1: 500.0}).checked().logit_bias == {1: 100.0}
    assert SamplingParams(logprob_token_ids=[3]).checked().logprobs == 0
    everything = SamplingParams(logprobs=-1, prompt_logprobs=-1).checked(max_logprobs=None, vocab_size=8)
    assert (everything.logprobs, everything.prompt_logprobs) == (8, 8)
    assert SamplingParams().output_kind is OutputKind.CUMULATIVE


def test_choices_have_different_seeds() -> None:
    seeds = {seed_of_choice(42, choice) for choice in range(1000)}
    assert len(seeds) == 1000
    assert seed_of_choice(42, 0) == 42


def test_metrics_snapshot_survives_the_heartbeat() -> None:
    metrics = Metrics()
    metrics.counter("things", "Things done.", kind="a").inc(2)
    metrics.gauge("level", "How high.").set(0.5)
    histogram = metrics.histogram("wait_seconds", "Waiting.", (0.1, 1.0))
    for value in (0.1, 0.5, 5.0):
        histogram.observe(value)
    snapshot = decode_snapshot(metrics.encoded())
    assert snapshot.counters[0].value == 2
    assert snapshot.counters[0].labels == (("kind", "a"),)
    assert snapshot.histograms[0].counts == [1, 1, 1]
    assert snapshot.histograms[0].total == pytest.approx(5.6)
    assert decode_snapshot(b"").counters == []


def test_errors_are_plain_exceptions() -> None:
    assert not dataclasses.is_dataclass(RequestError)
    assert str(RequestError(ErrorCode.INVALID, "why", "n")) == "why"
