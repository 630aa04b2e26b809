"""One step's tokens as text for each frontend: starts, finishes, replays, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from quintet.detokenizer_proc import logprobs
from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.rows import Cores, Steps
from quintet.detokenizer_proc.vocabulary import Vocabulary
from quintet.wire.codec import pack_f32, pack_i32, pack_i64, pack_u8, unpack_i32
from quintet.wire.ids import RequestIds
from quintet.wire.messages import FinishReason, Open, Text, Tokens
from quintet.wire.request import Echo
from quintet.wire.step import DraftCounts, PromptLogprobs, TokenLogprobs

NONE, STOP, LENGTH, ABORT = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
ONE = RequestIds(0, 1).take()


@pytest.fixture(scope="session")
def tokenizer(tokenizers_by_style: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_style["byte_level"]


@pytest.fixture
def steps(tokenizer: Tokenizer) -> Steps:
    showing = PieceTable(Vocabulary.of(tokenizer))
    return Steps(showing)


def opening(request_id: int = ONE, prompt: Sequence[int] = (), **changes: Any) -> Open:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "num_prompt_tokens": len(prompt),
        "num_cached_tokens": 3,
        "prompt_ids": pack_i32(prompt),
        "stop": [],
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "detokenize": True,
        "echo": Echo.NONE,
        "return_prompt_ids": False,
        "min_tokens": 0,
        "arrival_ns": 11,
        "scheduled_ns": 22,
    }
    return Open(**(fields | changes))


Row = tuple[int, int, list[int], FinishReason]


def tokens(*rows: Row, opens: Sequence[Open] = (), named_stops: Sequence[int] = (), **changes: Any) -> Tokens:
    return Tokens(
        5,
        6,
        list(opens),
        pack_i64(row[0] for row in rows),
        pack_i32(row[1] for row in rows),
        pack_u8(len(row[2]) for row in rows),
        pack_i32(token for row in rows for token in row[2]),
        pack_u8(row[3] for row in rows),
        pack_i32(named_stops),
        **changes,
    )


def only(steps: Steps, message: Tokens) -> Text:
    ((_, text),) = steps.apply(message)
    return text


def test_a_request_from_beginning_to_end(steps: Steps, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello 😀 there you").ids
    first = only(steps, tokens((ONE, 0, ids[:1], NONE), opens=[opening(prompt=[7, 8])]))
    (started,) = first.started
    assert (started.request_id, started.num_prompt_tokens, started.num_cached_tokens) == (ONE, 2, 3)
    assert (started.arrival_ns, started.scheduled_ns, first.step, first.tokens_sent_ns) == (11, 22, 5, 6)
    text = first.deltas[0]
    for i in range(1, len(ids) - 1):
        message = only(steps, tokens((ONE, i, ids[i : i + 1], NONE)))
        assert not message.started
        assert (message.offsets, message.first_indexes, message.num_tokens) == ([len(text)], [i], [1])
        assert message.token_ids == pack_i32(ids[i : i + 1])
        text += message.deltas[0]
    last = only(steps, tokens((ONE, len(ids) - 1, ids[-1:], LENGTH)))
    assert text + last.deltas[0] == "Hello 😀 there you"
    (finish,) = last.finishes
    assert (finish.reason, finish.stop_reason, finish.num_output_tokens) == (LENGTH, None, len(ids))
    assert steps.num_open == 0


def test_an_incomplete_character_is_flushed_at_the_end(steps: Steps, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦩").ids
    assert len(ids) > 1
    text = only(steps, tokens((ONE, 0, ids[:-1], LENGTH), opens=[opening()]))
    assert text.deltas == [tokenizer.decode(ids[:-1])] == ["\ufffd"]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_shown_only_if_included(steps: Steps, tokenizer: Tokenizer, include: bool) -> None:
    ids = tokenizer.encode("user hello").ids
    message = tokens(
        (ONE, 0, ids, STOP), opens=[opening(include_stop_str_in_output=include)], named_stops=[0]
    )
    text = only(steps, message)
    assert text.deltas == [tokenizer.decode(ids if include else ids[:-1])]
    assert unpack_i32(text.token_ids).tolist() == ids  # type: ignore[attr-defined]
    assert (text.finishes[0].stop_reason, text.finishes[0].num_output_tokens) == (ids[-1], len(ids))


def test_end_of_sequence_has_no_stop_reason_and_no_text(steps: Steps, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    ids = [*tokenizer.encode("hello").ids, end]
    text = only(steps, tokens((ONE, 0, ids, STOP), opens=[opening(skip_special_tokens=False)]))
    assert text.deltas == ["hello"]
    assert (text.finishes[0].reason, text.finishes[0].stop_reason) == (STOP, None)


def test_a_stop_string_takes_precedence_over_length(steps: Steps, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world").ids
    text = only(steps, tokens((ONE, 0, ids, LENGTH), opens=[opening(stop=["world"])]))
    assert text.deltas == ["hello "]
    assert (text.finishes[0].reason, text.finishes[0].stop_reason) == (STOP, "world")
    assert steps.take_stop_hits() == []  # the core has already ended the request


def test_a_stop_string_is_sent_to_the_core_and_later_tokens_are_dropped(
    steps: Steps, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("hello world, and").ids
    text = only(steps, tokens((ONE, 0, ids, NONE), opens=[opening(stop=["wor"])]))
    (finish,) = text.finishes
    assert (text.deltas, finish.reason, finish.stop_reason) == (["hello "], STOP, "wor")
    assert text.num_tokens == [finish.num_output_tokens]
    assert len(text.token_ids) == 4 * finish.num_output_tokens < 4 * len(ids)
    assert steps.take_stop_hits() == [(ONE, 0)]
    assert steps.take_stop_hits() == []
    assert steps.apply(tokens((ONE, len(ids), ids[:1], NONE))) == []
    assert steps.apply(tokens((ONE, len(ids) + 1, ids[:1], LENGTH))) == []


def test_held_back_text_is_flushed_at_the_end(steps: Steps, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello wor").ids
    text = only(steps, tokens((ONE, 0, ids, NONE), opens=[opening(stop=["world"])]))
    assert text.deltas == ["hello "]
    text = only(steps, tokens((ONE, len(ids), [], ABORT)))
    assert (text.deltas, text.offsets, text.num_tokens) == (["wor"], [6], [0])
    assert (text.finishes[0].reason, text.finishes[0].num_output_tokens) == (ABORT, len(ids))


def test_repeated_tokens_are_dropped(steps: Steps, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the quick brown fox").ids
    only(steps, tokens((ONE, 0, ids[:2], NONE), opens=[opening()]))
    assert steps.apply(tokens((ONE, 0, ids[:2], NONE))) == []
    text = only(steps, tokens((ONE, 1, ids[1:3], NONE)))
    assert (text.first_indexes, text.token_ids) == ([2], pack_i32(ids[2:3]))
    assert text.offsets == [len(tokenizer.decode(ids[:2]))]


def test_a_gap_is_an_internal_error(steps: Steps) -> None:
    with pytest.raises(AssertionError, match="token 4 arrived after 0"):
        steps.apply(tokens((ONE, 4, [1], NONE), opens=[opening()]))


@pytest.mark.parametrize("stop", [[], ["fox jumps"]])
def test_a_reopened_request_resumes_at_the_same_offset(
    steps: Steps, tokenizer: Tokenizer, stop: list[str]
) -> None:
    ids = tokenizer.encode("the quick 😀 brown fox").ids
    whole = only(steps, tokens((ONE, 0, ids, NONE), opens=[opening(stop=stop)]))
    for split in range(1, len(ids)):
        again = opening(stop=stop, output_ids=pack_i32(ids[:split]), num_seen=split)
        text = only(steps, tokens((ONE, split, ids[split:], NONE), opens=[again]))
        assert text.deltas[0] == whole.deltas[0][text.offsets[0] :]


def test_outputs_not_received_by_the_frontend_are_sent_immediately(
    steps: Steps, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("the quick 😀 brown fox").ids
    whole = only(steps, tokens((ONE, 0, ids, NONE), opens=[opening()])).deltas[0]
    for split in range(len(ids)):
        again = opening(output_ids=pack_i32(ids), num_seen=split, attempt=split + 1)
        text = only(steps, tokens(opens=[again]))
        assert text.started[0].request_id == ONE
        assert text.deltas == [whole[text.offsets[0] :]]
        assert (text.first_indexes, text.token_ids) == ([split], pack_i32(ids[split:]))


def test_a_stop_string_in_received_text_ends_the_reopened_request(steps: Steps, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello").ids
    again = opening(stop=["hello"], output_ids=pack_i32(ids), num_seen=len(ids), attempt=1)
    text = only(steps, tokens(opens=[again]))
    assert (text.deltas, text.finishes[0].stop_reason) == ([], "hello")
    assert steps.take_stop_hits() == [(ONE, 1)]


def test_rows_of_unknown_requests_are_dropped(steps: Steps) -> None:
    """A new detokenizer receives them until frontends resend its predecessor's requests."""
    assert steps.apply(tokens((ONE, 0, [], ABORT))) == []
    assert steps.apply(tokens((ONE, 3, [9], NONE))) == []


def test_a_new_core_starts_without_requests_and_rows_of_the_old_one_are_dropped(steps: Steps) -> None:
    only(steps, tokens((ONE, 0, [9], NONE), opens=[opening()], core_epoch=1))
    only(steps, tokens((ONE, 0, [8], NONE), opens=[opening(attempt=1)], core_epoch=2))
    assert steps.apply(tokens((ONE, 1, [9], NONE), core_epoch=1)) == []
    assert only(steps, tokens((ONE, 1, [7], NONE), core_epoch=2)).token_ids == pack_i32([7])
    assert steps.accept_core(3)
    assert steps.num_open == 0


def test_a_closed_request_is_dropped(steps: Steps) -> None:
    only(steps, tokens((ONE, 0, [9], NONE), opens=[opening()]))
    assert steps.apply(tokens(closed=pack_i64([ONE]))) == []
    assert steps.num_open == 0


def test_a_request_reopened_after_a_stop_hit_repeats_the_hit(steps: Steps, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello").ids
    steps.apply(tokens((ONE, 0, ids, NONE), opens=[opening(stop=["hello"])]))
    assert steps.take_stop_hits() == [(ONE, 0)]
    assert steps.apply(tokens((ONE, 1, [4], NONE), opens=[opening(output_ids=pack_i32(ids))])) == []
    assert steps.take_stop_hits() == [(ONE, 0)]


def test_frontends_get_their_rows_and_requests_of_a_lost_one_are_dropped(steps: Steps) -> None:
    other = RequestIds(3, 2).take()
    sent = steps.apply(
        tokens((ONE, 0, [9], NONE), (other, 0, [9], NONE), opens=[opening(ONE), opening(other)])
    )
    assert {(box.index, box.epoch_tag): text.request_ids for box, text in sent} == {
        (0, 1): [ONE],
        (3, 2): [other],
    }
    steps.forget_frontend(3, 3)
    assert steps.num_open == 1
    text = only(steps, tokens((ONE, 1, [9], NONE), (other, 1, [9], NONE)))
    assert text.request_ids == [ONE]


def test_without_detokenizing_only_ids_are_sent(steps: Steps) -> None:
    text = only(steps, tokens((ONE, 0, [300], NONE), opens=[opening(detokenize=False)]))
    text = only(steps, tokens((ONE, 1, [301], NONE)))
    assert (text.deltas, text.token_ids) == ([""], pack_i32([301]))
    text = only(steps, tokens((ONE, 2, [302], LENGTH)))
    assert (text.deltas, text.finishes[0].num_output_tokens) == ([""], 3)


def test_echo_and_prompt_ids_are_sent_with_the_first_token(steps: Steps, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Hello <|im_end|>there").ids
    echo = opening(prompt=prompt, echo=Echo.PLAIN, return_prompt_ids=True)
    text = only(steps, tokens((ONE, 0, [tokenizer.token_to_id("!")], NONE), opens=[echo]))
    assert text.started[0].prompt_text == tokenizer.decode(prompt)
    assert text.started[0].prompt_ids == pack_i32(prompt)
    assert text.offsets == [0]


def test_logprobs_have_tokens_and_text_offsets(steps: Steps, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Hello").ids
    ids = [*tokenizer.encode(" 🦩 fox").ids, tokenizer.token_to_id("<|im_end|>")]
    entries = [
        TokenLogprobs(0, i + 1, pack_i32([token, 70, 71]), pack_f32([-0.5, -0.25, -2.0]))
        for i, token in enumerate(ids)
    ]
    message = tokens((ONE, 0, ids, STOP), opens=[opening(prompt=prompt, echo=Echo.PLAIN)], logprobs=entries)
    (row,) = only(steps, message).logprobs
    assert row.row == 0
    assert [position.chosen.token_id for position in row.positions] == ids
    assert [position.chosen.rank for position in row.positions] == list(range(1, len(ids) + 1))
    assert b"".join(position.chosen.token_bytes for position in row.positions) == " 🦩 fox<|im_end|>".encode()
    assert [(top.token_id, top.rank) for top in row.positions[0].top] == [(70, 1), (71, 2)]
    assert row.positions[0].chosen.logprob == -0.5
    base = len("Hello")
    assert row.positions[0].text_offset == base
    assert row.positions[-1].text_offset == base + len(" 🦩 fox")
    flamingo = [p.text_offset for p in row.positions if p.chosen.token == "\ufffd"]
    assert set(flamingo) <= {base + 1}


def test_logprobs_of_replayed_tokens_are_dropped_with_them(steps: Steps) -> None:
    def entry(token: int) -> TokenLogprobs:
        return TokenLogprobs(0, 1, pack_i32([token]), pack_f32([-1.0]))

    only(steps, tokens((ONE, 0, [80, 81], NONE), opens=[opening()], logprobs=[entry(80), entry(81)]))
    text = only(steps, tokens((ONE, 1, [81, 82], NONE), logprobs=[entry(81), entry(82)]))
    assert [position.chosen.token_id for position in text.logprobs[0].positions] == [82]


def test_prompt_logprobs_are_collected_until_the_first_token(steps: Steps, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("the quick brown fox").ids
    assert len(prompt) >= 4

    def entries(first: int, stop: int) -> PromptLogprobs:
        ids = [token for i in range(first, stop) for token in (prompt[i], 90 + i)]
        ranks = [10 + i for i in range(first, stop)]
        return PromptLogprobs(
            0, first, 2, pack_i32(ranks), pack_i32(ids), pack_f32([-1.0, -0.5] * len(ranks))
        )

    message = tokens(
        (ONE, 0, [], NONE),
        opens=[opening(prompt=prompt, echo=Echo.PLAIN, prompt_logprobs=True)],
        prompt_logprobs=[entries(1, 3)],
    )
    assert steps.apply(message) == []
    message = tokens((ONE, 0, [9], NONE), prompt_logprobs=[entries(3, len(prompt))])
    known = only(steps, message).started[0].prompt_logprobs
    assert known is not None and known[0] is None and len(known) == len(prompt)
    for i in range(1, len(prompt)):
        position = known[i]
        assert position is not None
        assert (position.chosen.token_id, position.chosen.rank) == (prompt[i], 10 + i)
        assert [top.token_id for top in position.top] == [90 + i]
        assert position.text_offset == len(tokenizer.decode(prompt[:i]))


def test_prompt_logprobs_of_one_token_are_one_none(steps: Steps) -> None:
    """The first token of a prompt has no probability."""
    text = only(steps, tokens((ONE, 0, [9], NONE), opens=[opening(prompt=[9], prompt_logprobs=True)]))
    assert text.started[0].prompt_logprobs == [None]


def test_only_rows_with_logprobs_take_the_slow_path(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(ONE, ONE + 8))
    steps.apply(tokens(*((i, 0, [80], NONE) for i in ids), opens=[opening(i) for i in ids]))
    taken: list[int] = []
    apply_row = Steps._apply_row

    def counting(self: Steps, request: Any, *arguments: Any) -> None:
        taken.append(request.opened.request_id)
        apply_row(self, request, *arguments)

    monkeypatch.setattr(Steps, "_apply_row", counting)
    entry = TokenLogprobs(3, 1, pack_i32([81]), pack_f32([-1.0]))
    text = only(steps, tokens(*((i, 1, [81], NONE) for i in ids), logprobs=[entry]))
    assert taken == [ids[3]]
    assert list(text.request_ids) == ids
    assert text.deltas == [text.deltas[0]] * 8 and text.deltas[0]
    assert [(row.row, row.positions[0].chosen.token_id) for row in text.logprobs] == [(3, 81)]


def test_prompt_offsets_are_computed_once(
    steps: Steps, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokenizer.encode("the quick brown fox jumps over the lazy dog").ids
    lengths: list[int] = []
    prompt_offsets = logprobs.prompt_offsets

    def counting(table: PieceTable, prompt_ids: Sequence[int]) -> Sequence[int]:
        lengths.append(len(prompt_ids))
        return prompt_offsets(table, prompt_ids)

    monkeypatch.setattr(logprobs, "prompt_offsets", counting)
    opens = [opening(prompt=prompt, echo=Echo.PLAIN, prompt_logprobs=True)]
    for i in range(1, len(prompt)):  # one token of the prompt in each step
        chunk = PromptLogprobs(0, i, 1, pack_i32([1]), pack_i32([prompt[i]]), pack_f32([-1.0]))
        steps.apply(tokens((ONE, 0, [], NONE), opens=opens if i == 1 else [], prompt_logprobs=[chunk]))
    known = only(steps, tokens((ONE, 0, [9], NONE))).started[0].prompt_logprobs
    assert known is not None
    starts = [position.text_offset for position in known if position is not None]
    assert starts == [len(tokenizer.decode(prompt[:i])) for i in range(1, len(prompt))]
    assert lengths == [len(prompt)]


@pytest.mark.parametrize("echo", [Echo.PLAIN, Echo.WHOLE])
def test_special_tokens_of_the_prompt_are_echoed(steps: Steps, tokenizer: Tokenizer, echo: Echo) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    prompt = [end, *tokenizer.encode("Hello").ids, end]
    chunk = PromptLogprobs(
        0, 1, 1, pack_i32([1] * (len(prompt) - 1)), pack_i32(prompt[1:]), pack_f32([-1.0] * (len(prompt) - 1))
    )
    opened = opening(prompt=prompt, echo=echo, prompt_logprobs=True)
    text = only(steps, tokens((ONE, 0, [end, prompt[1]], LENGTH), opens=[opened], prompt_logprobs=[chunk]))
    (started,) = text.started
    mark = "<|im_end|>" if echo is Echo.WHOLE else ""
    assert started.prompt_text == f"{mark}Hello{mark}"
    assert started.first_token is not None and started.prompt_logprobs is not None
    assert (started.first_token.token_id, started.first_token.token) == (end, "<|im_end|>")
    starts = [position.text_offset for position in started.prompt_logprobs if position is not None]
    assert (starts[0], starts[-1]) == (len(mark), len(f"{mark}Hello"))
    assert text.deltas == [tokenizer.decode(prompt[1:2])], "skip_special_tokens applies to the output"


def test_a_request_belongs_to_one_core(steps: Steps) -> None:
    """The core with the newest attempt owns the request."""
    cores = Cores(steps)
    assert cores.apply(tokens((ONE, 0, [9], NONE), opens=[opening()]))
    assert cores.apply(tokens((ONE, 0, [9, 8], NONE), opens=[opening(attempt=1)], core=1, core_epoch=3))
    assert cores.apply(tokens((ONE, 1, [7], NONE))) == []
    ((_, text),) = cores.apply(tokens((ONE, 2, [7], NONE), core=1, core_epoch=3))
    assert (text.token_ids, cores.num_open) == (pack_i32([7]), 1)
    cores.forget_core(1, 3)
    assert cores.num_open == 0


def test_draft_tokens_are_counted_until_the_end(steps: Steps, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four five six").ids
    other = RequestIds(0, 1).take() + 1
    message = tokens((ONE, 0, ids[:3], NONE), (other, 0, ids[:1], NONE), opens=[opening(), opening(other)])
    message.num_drafts = bytes([4, 0])
    only(steps, message)
    only(steps, tokens((ONE, 3, ids[3:4], NONE), num_drafts=bytes([2])))
    last = tokens((ONE, 4, ids[4:6], LENGTH), (other, 1, ids[1:2], LENGTH), num_drafts=bytes([1, 0]))
    finishes = only(steps, last).finishes
    assert [finish.drafts for finish in finishes] == [DraftCounts(7, [1, 1, 1]), None]
