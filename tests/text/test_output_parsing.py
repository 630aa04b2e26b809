"""Steps of requests whose output is read by parsers: rows in channels, and the same ones from another process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.text.conftest import byte_level
from tests.text.test_rows import LENGTH, NONE, ONE, STOP, only, opening, tokens
from tokenizers import Tokenizer

from quintet.detokenizer_proc.incremental import PieceTable
from quintet.detokenizer_proc.parsers.forced import FORCED, forced_calls
from quintet.detokenizer_proc.rows import Steps
from quintet.detokenizer_proc.vocabulary import Vocabulary
from quintet.wire.channels import Channel, Span
from quintet.wire.codec import pack_i32
from quintet.wire.messages import Finish, FinishReason, Open, Text
from quintet.wire.request import OutputParsing

CONTENT, REASONING, NAME, ARGUMENTS = map(int, Channel)
READING = OutputParsing("qwen3", "hermes")
OUTPUT = (
    '<think>\nthe fox jumps\n</think>\n\nHello 😀\n<tool_call>\n{"name": "main", "arguments": {"user": "né"}}\n</tool_call>\n'
    '<tool_call>{"name": "len", "arguments": {}}</tool_call>'
)
TOLD = [
    (REASONING, 0, "the fox jumps"),
    (CONTENT, 0, "Hello 😀"),
    (NAME, 0, "main"),
    (ARGUMENTS, 0, '{"user": "né"}'),
    (NAME, 1, "len"),
    (ARGUMENTS, 1, "{}"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Marks are special tokens, one of them spelled otherwise in text."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<think>", "</think>", "<|eot|>"])
    return tokenizer


@pytest.fixture
def showing(tokenizer: Tokenizer) -> PieceTable:
    return PieceTable(Vocabulary.of(tokenizer))


def steps_of(showing: PieceTable) -> Steps:
    return Steps(showing.skipping_special_tokens(), showing)


def sorted_out(texts: Sequence[Text]) -> list[tuple[int, int, str]]:
    """Join what rows of one request tell, by channel; each row's spans are all of its delta."""
    found: list[tuple[int, int, str]] = []
    for text in texts:
        spans: dict[int, list[Span]] = {row.row: row.spans for row in text.spans}
        for row, delta in enumerate(text.deltas):
            at = 0
            for channel, call, size in spans.get(row, []):
                part = delta[at : at + size]
                at += size
                if found and found[-1][:2] == (channel, call):
                    found[-1] = (channel, call, found[-1][2] + part)
                else:
                    found.append((channel, call, part))
            assert at == len(delta)
    return found


def run(steps: Steps, ids: Sequence[int], opened: Open, first: int = 0) -> list[Text]:
    """Apply tokens one at a time from ``first`` on; the last one ends the request."""
    assert steps.apply(tokens(opens=[opened])) == []
    texts = []
    for i in range(first, len(ids)):
        finish = LENGTH if i == len(ids) - 1 else NONE
        texts.append(only(steps, tokens((ONE, i, [ids[i]], finish))))
    return texts


def finish_of(texts: Sequence[Text]) -> Finish:
    (finish,) = texts[-1].finishes
    return finish


def test_rows_are_told_in_channels(showing: PieceTable, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(OUTPUT).ids
    texts = run(steps_of(showing), ids, opening(parsing=READING))
    assert sorted_out(texts) == TOLD
    whole = "".join(delta for text in texts for delta in text.deltas)
    told = 0
    for text in texts:
        assert text.offsets == [told]
        told += len(text.deltas[0])
    assert told == len(whole)
    inside = ids.index(tokenizer.token_to_id("</think>")) - ids.index(tokenizer.token_to_id("<think>")) - 1
    finish = finish_of(texts)
    assert (finish.num_calls, finish.num_reasoning_tokens, finish.num_output_tokens) == (2, inside, len(ids))


def test_another_process_goes_on_in_the_same_channels_after_any_token(
    showing: PieceTable, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(OUTPUT).ids
    before = run(steps_of(showing), ids, opening(parsing=READING))
    for seen in range(1, len(ids)):
        opened = opening(parsing=READING, output_ids=pack_i32(ids[:seen]), num_seen=seen, attempt=1)
        steps = steps_of(showing)
        assert steps.apply(tokens(opens=[opened])) == []
        after = [
            only(steps, tokens((ONE, i, [ids[i]], LENGTH if i == len(ids) - 1 else NONE)))
            for i in range(seen, len(ids))
        ]
        assert [(text.deltas, text.offsets, text.spans) for text in after] == [
            (text.deltas, text.offsets, text.spans) for text in before[seen:]
        ]
        assert finish_of(after) == finish_of(before)


def test_only_marks_show_of_special_tokens(showing: PieceTable, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a<|eot|>b</think><|eot|>c").ids
    assert sorted_out(run(steps_of(showing), ids, opening(parsing=OutputParsing("qwen3")))) == [
        (REASONING, 0, "ab"),
        (CONTENT, 0, "c"),
    ]
    plain = run(steps_of(showing), ids, opening())
    assert "".join(delta for text in plain for delta in text.deltas) == "abc"
    assert not any(text.spans for text in plain)


@pytest.mark.parametrize(
    ("parsing", "special", "output", "told"),
    [
        (
            OutputParsing("gemma"),
            ["<|channel>", "<channel|>"],
            "<|channel>thought\nthe fox<channel|>Hello",
            [(REASONING, 0, "the fox"), (CONTENT, 0, "Hello")],
        ),
        (
            OutputParsing("", "mistral"),
            ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
            "[TOOL_CALLS]main[CALL_ID]abc123456[ARGS]{}",
            [(NAME, 0, "main"), (ARGUMENTS, 0, "{}")],
        ),
        (
            OutputParsing("", "deepseek_v3"),
            ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>main\n```json\n{}\n```<｜tool▁call▁end｜>",
            [(NAME, 0, "main"), (ARGUMENTS, 0, "{}")],
        ),
    ],
)
def test_special_tokens_within_marks_and_heads_are_seen(
    parsing: OutputParsing, special: list[str], output: str, told: list[tuple[int, int, str]]
) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(special)
    steps = steps_of(PieceTable(Vocabulary.of(tokenizer)))
    assert sorted_out(run(steps, tokenizer.encode(output).ids, opening(parsing=parsing))) == told


def test_the_prompts_end_says_that_the_output_is_reasoning(showing: PieceTable, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("user hello<think>\n").ids
    ids = tokenizer.encode("so</think>yes").ids
    texts = run(steps_of(showing), ids, opening(prompt=prompt, parsing=OutputParsing("qwen3")))
    assert sorted_out(texts) == [(REASONING, 0, "so"), (CONTENT, 0, "yes")]


@pytest.mark.parametrize("name", ["hermes", *FORCED])
@pytest.mark.parametrize("finish", [LENGTH, STOP])
def test_an_answer_that_must_be_calls_has_no_content_wherever_it_ends(
    name: str, finish: FinishReason
) -> None:
    tokenizer = byte_level()
    showing, how = PieceTable(Vocabulary.of(tokenizer)), forced_calls("", name)
    calls = [("main", '{"user": "x"}'), ("len", '{"a": [1]}')][: 1 if how.is_single else 2]
    written = (how.call_begin + called + how.name_end + given + how.call_end for called, given in calls)
    ids = tokenizer.encode(how.begin + how.separator.join(written) + how.end).ids
    for end in range(1, len(ids) + 1):
        steps = steps_of(showing)
        steps.apply(tokens(opens=[opening(parsing=OutputParsing("", how.reader, requires_calls=True))]))
        text = only(steps, tokens((ONE, 0, ids[:end], finish)))
        assert CONTENT not in {channel for channel, _, _ in sorted_out([text])}


def test_a_call_that_was_cut_off_is_no_content_beside_whole_ones(
    showing: PieceTable, tokenizer: Tokenizer
) -> None:
    end = OUTPUT.index('": {}}')
    ids = tokenizer.encode(OUTPUT[:end]).ids
    texts = run(steps_of(showing), ids, opening(parsing=READING))
    assert sorted_out(texts) == TOLD[:4]


def test_a_stop_string_ends_what_is_read(showing: PieceTable, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('Hello {"a": 1} there').ids
    opened = opening(parsing=OutputParsing("", "llama3_json"), stop=["there"])
    steps = steps_of(showing)
    steps.apply(tokens(opens=[opened]))
    text = only(steps, tokens((ONE, 0, ids, NONE)))
    assert (text.deltas, finish_of([text]).reason) == (['Hello {"a": 1} '], STOP)


@pytest.mark.parametrize("parsing", [OutputParsing("no_such"), OutputParsing("", "no_such"), OutputParsing()])
def test_a_parser_that_is_not_here_reads_nothing(
    showing: PieceTable, tokenizer: Tokenizer, parsing: OutputParsing
) -> None:
    ids = tokenizer.encode("<think>a</think>b").ids
    texts = run(steps_of(showing), ids, opening(parsing=parsing))
    assert "".join(delta for text in texts for delta in text.deltas) == "ab"
    assert not any(text.spans for text in texts)
