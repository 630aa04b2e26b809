"""Validation at an inbox: lengths and numbers of messages."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire import supervision
from quintet.wire.codec import all_below, are_spans, encode, pack_f32, pack_i32, pack_i64, pack_u8
from quintet.wire.embeds import EmbedsSpan, digest_of
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_spec import KvGroup, KvSpec
from quintet.wire.params import RepetitionDetectionParams, SamplingParams, Thinking, ThinkingBound
from quintet.wire.request import MAX_NAME_CHARS, MAX_SCHEMAS_BYTES, OutputParsing, RequestSpec
from quintet.wire.validate import Validator

from .respec import changed
from .test_record import config_of

NAN = float("nan")
PARAMS = SamplingParams(seed=1)


@pytest.fixture
def validator(tmp_path: Path) -> Validator:
    """Validator of a server with 2048 blocks on the device and two on the host."""
    config = config_of(tmp_path)
    size = config.model.kv.bytes_per_block
    cache = msgspec.structs.replace(config.cache, memory_bytes=2048 * size, swap_bytes=2 * size)
    return Validator(msgspec.structs.replace(config, cache=cache))


def test_without_host_memory_swaps_are_invalid(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert not Validator(config).accepts(plan(swaps_out=pack_i32([0, 0])))


def test_host_blocks_are_without_the_draft_models_part(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    kv = msgspec.structs.replace(config.model.kv, draft_bytes=config.model.kv.bytes_per_block)
    cache = msgspec.structs.replace(config.cache, swap_bytes=2 * config.model.kv.bytes_per_block)
    model = msgspec.structs.replace(config.model, kv=kv)
    validator = Validator(msgspec.structs.replace(config, model=model, cache=cache))
    assert validator.accepts(plan(swaps_out=pack_i32([0, 1])))
    assert not validator.accepts(plan(swaps_out=pack_i32([0, 2])))


def test_gpu_block_numbers_are_not_bounded(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    cache = msgspec.structs.replace(config.cache, memory_bytes=0)
    validator = Validator(msgspec.structs.replace(config, cache=cache))
    assert validator.accepts(plan(blocks=pack_i32([0, 0, 0, 1 << 30]), copies=pack_i32([0, 1 << 30])))
    assert not validator.accepts(plan(copies=pack_i32([0, -1])))


def test_state_has_two_blocks_for_any_context_length(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    kv = KvSpec([KvGroup("full", [0]), KvGroup("state", [1])], 1, 64, 1024)
    model = msgspec.structs.replace(config.model, kv=kv, max_model_len=64)
    validator = Validator(msgspec.structs.replace(config, model=model))
    assert validator.accepts(plan(blocks=pack_i32([0, 0, 0, 1, 0, 1, 0, 2, 0, 1, 1, 2])))
    assert not validator.accepts(plan(blocks=pack_i32([0, 1, 2, 2])))


def test_embeddings_need_a_digest(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    validator = Validator(
        msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, embedding_width=4))
    )
    span = EmbedsSpan(0, "F32", 4, bytes(32))
    whole = msgspec.structs.replace(span, digest=digest_of(span))
    assert validator.accepts(msgspec.structs.replace(admit(), embeds=[whole]))
    assert not validator.accepts(msgspec.structs.replace(admit(), embeds=[span]))


@pytest.mark.parametrize(
    ("starts", "accepted"),
    [([1], True), ([0, 1], True), ([1, 0], False), ([0, 0], False), ([2], False), ([-1], False)],
)
def test_spans_of_embeddings_are_ordered_and_inside_the_prompt(
    starts: list[int], accepted: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    model = msgspec.structs.replace(config.model, embedding_width=4)
    validator = Validator(msgspec.structs.replace(config, model=model))
    spans = [EmbedsSpan(start, "F32", 4, bytes(16), bytes(32)) for start in starts]
    assert validator.accepts(msgspec.structs.replace(admit(), embeds=spans)) == accepted


def test_a_repetition_penalty_needs_leading_embeddings(tmp_path: Path) -> None:
    """It would count the placeholder ids of later spans as prompt tokens."""
    config = config_of(tmp_path)
    model = msgspec.structs.replace(config.model, embedding_width=4)
    validator = Validator(msgspec.structs.replace(config, model=model))
    spec = RequestSpec(msgspec.structs.replace(PARAMS, repetition_penalty=1.1), 0, 0)
    for start in (0, 1):
        spans = [EmbedsSpan(start, "F32", 4, bytes(16), bytes(32))]
        assert validator.accepts(msgspec.structs.replace(admit(), spec=spec, embeds=spans)) == (start == 0)


def submit(**change: Any) -> m.Submit:
    return changed(m.Submit(1, m.TokenPrompt(pack_i32([1])), RequestSpec(PARAMS, 0, 0), 0, 0), **change)


def admit(**change: Any) -> m.Admit:
    return changed(m.Admit(1, pack_i32([1, 7]), RequestSpec(PARAMS, 0, 0), 0), **change)


def plan(**change: Any) -> s.StepPlan:
    row = s.NewRow(0, 1, 1, pack_i32([1, 2]), 2, PARAMS, 1)
    made = s.StepPlan(
        1, 0, b"", [row], pack_i32([0, 0, 0, 1]), b"", pack_i32([0]), pack_i32([0]), pack_i32([2]), b"\1"
    )
    return msgspec.structs.replace(made, **change)


def tokens(**change: Any) -> m.Tokens:
    made = m.Tokens(1, 0, [], pack_i64([9]), pack_i32([0]), pack_u8([2]), pack_i32([1, 2]), pack_u8([0]), b"")
    return msgspec.structs.replace(made, **change)


def text(**change: Any) -> m.Text:
    return msgspec.structs.replace(
        m.Text(1, 0, 0, [], [9], ["a"], [0], [0], [1], pack_i32([1]), []), **change
    )


def result(**change: Any) -> s.StepResult:
    return msgspec.structs.replace(s.StepResult(1, 0, pack_i32([1])), **change)


def swapping(**change: Any) -> s.StepPlan:
    return plan(swaps_out=pack_i32([2047, 1]), swaps_in=pack_i32([0, 0, 1, 1]), **change)


MADE: list[Callable[..., msgspec.Struct]] = [submit, admit, plan, swapping, tokens, text, result]


@pytest.mark.parametrize("make", MADE)
def test_messages_of_the_processes_are_valid(
    validator: Validator, make: Callable[..., msgspec.Struct]
) -> None:
    assert validator.accepts(make())


@pytest.mark.parametrize(
    "message",
    [
        submit(request_id=-1),
        submit(request_id=(1 << 64) - 1),
        submit(core=1 << 40),
        submit(detokenizer=-1),
        submit(prompt=m.TokenPrompt(b"abc")),
        admit(output_ids=pack_i32([8])),
        submit(params=SamplingParams(n=0)),
        submit(params=SamplingParams(temperature=NAN)),
        submit(params=SamplingParams(top_p=NAN)),
        submit(params=SamplingParams(min_tokens=1 << 40)),
        submit(params=SamplingParams(seed=1 << 63)),
        admit(params=SamplingParams(logprobs=-1)),
        admit(params=SamplingParams(logit_bias={8: 1.0})),
        admit(params=SamplingParams(stop_token_ids=[8])),
        admit(params=SamplingParams(allowed_token_ids=[-1])),
        admit(params=SamplingParams(logprob_token_ids=[8])),
        admit(params=SamplingParams(thinking_bound=ThinkingBound(1, [Thinking([1], [8])], [[1]]))),
        admit(
            params=SamplingParams(repetition_detection=RepetitionDetectionParams(max_pattern_size=1 << 40))
        ),
        submit(params=SamplingParams(stop=[""])),
        admit(prompt_ids=pack_i32([-1])),
        admit(prompt_ids=pack_i32([8])),
        admit(bad_word_ids=[[]]),
        admit(bad_word_ids=[[1 << 40]]),
        submit(parsing=OutputParsing(reasoning="x" * (MAX_NAME_CHARS + 1))),
        submit(parsing=OutputParsing(tools="x" * (MAX_NAME_CHARS + 1))),
        admit(parsing=OutputParsing(schemas=bytes(MAX_SCHEMAS_BYTES + 1))),
        plan(slots=pack_i32([4])),
        plan(slots=pack_i32([-1])),
        plan(slots=b""),
        plan(samples=b"\2"),
        plan(counts=pack_i32([0])),
        plan(starts=pack_i32([63])),
        plan(blocks=pack_i32([0, 0, 1])),
        plan(blocks=pack_i32([0, 0, 4, 1])),
        plan(blocks=pack_i32([0, 1, 0, 1])),
        plan(blocks=pack_i32([0, 0, 0, 1 << 30])),
        plan(copies=pack_i32([0, 1 << 30])),
        plan(swaps_out=pack_i32([0])),
        plan(swaps_in=pack_i32([0, 2])),
        plan(swaps_in=pack_i32([1 << 30, 0])),
        plan(freed=pack_i32([4])),
        plan(new_rows=[s.NewRow(4, 1, 1, pack_i32([1]), 1, PARAMS, 1)]),
        plan(new_rows=[s.NewRow(0, 1, 1, pack_i32([1]), 2, PARAMS, 1)]),
        plan(new_rows=[s.NewRow(0, 1, 1, pack_i32([1]), 1, PARAMS, -1)]),
        plan(new_rows=[s.NewRow(0, 1, 1, pack_i32([1]), 1, SamplingParams(prompt_logprobs=9), 1)]),
        plan(new_rows=[s.NewRow(0, 1, 1, pack_i32([1]), 1, SamplingParams(allowed_token_ids=[8]), 1)]),
        tokens(request_ids=b""),
        tokens(num_tokens=b"\1"),
        tokens(token_ids=pack_i32([1, 8])),
        tokens(finishes=b"\6"),
        tokens(named_stops=b"abc"),
        tokens(named_stops=pack_i32([-1])),
        tokens(named_stops=pack_i32([1])),
        tokens(named_stops=pack_i32([0]), finishes=bytes([m.FinishReason.LENGTH])),
        tokens(
            named_stops=pack_i32([0]), finishes=bytes([m.FinishReason.STOP]), num_tokens=b"\0", token_ids=b""
        ),
        tokens(logprobs=[s.TokenLogprobs(1, 1, pack_i32([1]), pack_f32([0]))]),
        tokens(logprobs=[s.TokenLogprobs(0, 1, pack_i32([1, 2]), pack_f32([0]))]),
        tokens(prompt_logprobs=[s.PromptLogprobs(0, 1, 0, b"", b"", b"")]),
        text(deltas=[]),
        text(num_tokens=[-1]),
        text(token_ids=b"ab"),
        text(logprobs=[m.RowLogprobs(1, [])]),
        result(token_ids=pack_i32([8])),
        result(token_ids=b"ab"),
        result(logprobs=[s.TokenLogprobs(4, 1, pack_i32([1]), pack_f32([0]))]),
        s.Capacity(1, 0, 16, 4, 64),
        s.Capacity(1, 8, 8, 4, 64),
        s.Capacity(1, 8, 16, 5, 64),
        m.StopHit(pack_i64([1]), b""),
        m.StopHit(b"abc"),
        m.Cancel([-1], 0),
        supervision.Topology(
            1,
            [
                supervision.ProcessSlot(
                    WorkerId(Role.CORE, 0, 1), "no address", 1, supervision.SlotState.READY
                )
            ],
        ),
        supervision.Heartbeat(WorkerId(Role.CORE, 0, 1), 0, 0, 0, b"no snapshot"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_invalid_messages_are_rejected(validator: Validator, message: msgspec.Struct) -> None:
    try:
        received = msgspec.msgpack.decode(encode(message), type=type(message))
    except msgspec.ValidationError:
        return  # a number out of its type's range
    assert not validator.accepts(received)


@pytest.mark.parametrize("limit", [1, 2, 255, 256, 257, 1000, 65535, 65536, 65537, 1 << 24, (1 << 31) - 1])
def test_column_limit(limit: int) -> None:
    draw = random.Random(limit)
    edges = [0, limit - 1, limit, limit + 1, limit - 256, limit + 255, -1, -(1 << 31), (1 << 31) - 1]
    edges = [number for number in edges if -(1 << 31) <= number < 1 << 31]
    for edge in edges:
        for _ in range(20):
            numbers = [draw.randrange(limit) for _ in range(draw.randrange(4))] + [edge]
            draw.shuffle(numbers)
            assert all_below(pack_i32(numbers), limit) == all(0 <= n < limit for n in numbers), numbers
    assert all_below(b"", limit)


def test_span_limit() -> None:
    draw = random.Random(5)
    edges = (0, 1, 2, 49, 50, 51, 255, 256, (1 << 31) - 1, -1, -(1 << 31))
    seen = set()
    for _ in range(3000):
        size = draw.randrange(1, 5)
        starts = [draw.choice(edges) if draw.random() < 0.2 else draw.randrange(25) for _ in range(size)]
        counts = [draw.choice(edges) if draw.random() < 0.2 else draw.randrange(1, 25) for _ in range(size)]
        fit = all(a >= 0 and b >= 1 and a + b < 50 for a, b in zip(starts, counts, strict=True))
        assert are_spans(pack_i32(starts), pack_i32(counts), 50) == fit, (starts, counts)
        seen.add(fit)
    assert seen == {True, False}
    assert are_spans(b"", b"", 50)
