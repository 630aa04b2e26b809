"""Steps of requests with output parsers: rows in channels, also after a restart of the process."""

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
from quintet.wire.channels import Channel, TextSpan
from quintet.wire.codec import pack_i32
from quintet.wire.messages import Finish, FinishReason, Open, Text
from quintet.wire.request import OutputParsing

CONTENT, REASONING, NAME, ARGUMENTS = map(int, Channel)
READING = OutputParsing("qwen3", "hermes")
OUTPUT = (
    '<think>\nthe fox jumps\n</think>\n\nHello 😀\n<tool_call>\n{"name": "main", "arguments": {"user": "né"}}\n</tool_call>\n'
    '<tool_call>{"name": "len", "arguments": {}}</tool_call>'
)
EXPECTED = [
    (REASONING, 0, "the fox jumps"),
    (CONTENT, 0, "Hello 😀"),
    (NAME, 0, "main"),
    (ARGUMENTS, 0, '{"user": "né"}'),
    (NAME, 1, "len"),
    (ARGUMENTS, 1, "{}"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Tokenizer with the marks as special tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<think>", "</think>", "<|eot|>"])
    return tokenizer


@pytest.fixture
def showing(tokenizer: Tokenizer) -> PieceTable:
    return PieceTable(Vocabulary.of(tokenizer))


def steps_of(showing: PieceTable) -> Steps:
    return Steps(showing)


def channel_texts(texts: Sequence[Text]) -> list[tuple[int, int, str]]:
    """Join the spans of one request's rows by channel. The spans of a row cover its delta."""
    found: list[tuple[int, int, str]] = []
    for text in texts:
        spans: dict[int, list[TextSpan]] = {row.row: row.spans for row in text.spans}
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


def test_rows_have_channels(showing: PieceTable, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(OUTPUT).ids
    texts = run(steps_of(showing), ids, opening(parsing=READING))
    assert channel_texts(texts) == EXPECTED
    whole = "".join(delta for text in texts for delta in text.deltas)
    offset = 0
    for text in texts:
        assert text.offsets == [offset]
        offset += len(text.deltas[0])
    assert offset == len(whole)
    inside = ids.index(tokenizer.token_to_id("</think>")) - ids.index(tokenizer.token_to_id("<think>")) - 1
    finish = finish_of(texts)
    assert (finish.num_calls, finish.num_reasoning_tokens, finish.num_output_tokens) == (2, inside, len(ids))


def test_another_process_resumes_in_the_same_channels_after_any_token(
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


def test_special_tokens_that_are_not_marks_are_skipped(showing: PieceTable, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a<|eot|>b</think><|eot|>c").ids
    assert channel_texts(run(steps_of(showing), ids, opening(parsing=OutputParsing("qwen3")))) == [
        (REASONING, 0, "ab"),
        (CONTENT, 0, "c"),
    ]
    plain = run(steps_of(showing), ids, opening())
    assert "".join(delta for text in plain for delta in text.deltas) == "abc"
    assert not any(text.spans for text in plain)


@pytest.mark.parametrize(
    ("parsing", "special", "output", "expected"),
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
def test_special_tokens_within_marks_and_headers_are_parsed(
    parsing: OutputParsing, special: list[str], output: str, expected: list[tuple[int, int, str]]
) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(special)
    steps = steps_of(PieceTable(Vocabulary.of(tokenizer)))
    assert channel_texts(run(steps, tokenizer.encode(output).ids, opening(parsing=parsing))) == expected


def test_a_prompt_that_opens_reasoning_starts_the_output_in_reasoning(
    showing: PieceTable, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("user hello<think>\n").ids
    ids = tokenizer.encode("so</think>yes").ids
    texts = run(steps_of(showing), ids, opening(prompt=prompt, parsing=OutputParsing("qwen3")))
    assert channel_texts(texts) == [(REASONING, 0, "so"), (CONTENT, 0, "yes")]


@pytest.mark.parametrize("name", ["hermes", *FORCED])
@pytest.mark.parametrize("finish", [LENGTH, STOP])
def test_an_answer_of_required_calls_has_no_content_at_any_length(name: str, finish: FinishReason) -> None:
    tokenizer = byte_level()
    showing, call_format = PieceTable(Vocabulary.of(tokenizer)), forced_calls("", name)
    calls = [("main", '{"user": "x"}'), ("len", '{"a": [1]}')][: 1 if call_format.is_single else 2]
    written = (
        call_format.call_begin + called + call_format.name_end + given + call_format.call_end
        for called, given in calls
    )
    ids = tokenizer.encode(call_format.begin + call_format.separator.join(written) + call_format.end).ids
    for end in range(1, len(ids) + 1):
        steps = steps_of(showing)
        steps.apply(
            tokens(opens=[opening(parsing=OutputParsing("", call_format.reader, requires_calls=True))])
        )
        text = only(steps, tokens((ONE, 0, ids[:end], finish)))
        assert CONTENT not in {channel for channel, _, _ in channel_texts([text])}


def test_a_truncated_call_after_whole_ones_is_not_content(showing: PieceTable, tokenizer: Tokenizer) -> None:
    end = OUTPUT.index('": {}}')
    ids = tokenizer.encode(OUTPUT[:end]).ids
    texts = run(steps_of(showing), ids, opening(parsing=READING))
    assert channel_texts(texts) == EXPECTED[:4]


def test_a_stop_string_ends_parsing(showing: PieceTable, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('Hello {"a": 1} there').ids
    opened = opening(parsing=OutputParsing("", "llama3_json"), stop=["there"])
    steps = steps_of(showing)
    steps.apply(tokens(opens=[opened]))
    text = only(steps, tokens((ONE, 0, ids, NONE)))
    assert (text.deltas, finish_of([text]).reason) == (['Hello {"a": 1} '], STOP)


@pytest.mark.parametrize(
    ("stop", "reasoning", "content", "hit"),
    [
        (["Question:"], "Question: a\n\nb", "So", "Question:"),
        (["\n\n"], "Question: a\n\nb", "So Question: c", "\n\n"),
        (["\n\n", "a"], "Question: a\n\nb", "So Question: c", "\n\n"),
        (["</think>"], "Question: a\n\nb", "", "</think>"),
        (["Question:", "</think>"], "Question: a\n\nb", "", "</think>"),
        (["</thin", "nothing"], "Question: a\n\nb", "So Question: c\n\nd", None),
    ],
)
def test_stop_strings_apply_to_the_answer_and_marks(
    showing: PieceTable, tokenizer: Tokenizer, stop: list[str], reasoning: str, content: str, hit: str | None
) -> None:
    """Benchmarks send stop strings with each request, such as lm-eval's "Question:", which reasoning repeats."""
    ids = tokenizer.encode("<think>\nQuestion: a\n\nb\n</think>\n\nSo Question: c\n\nd").ids
    opened = opening(parsing=OutputParsing("qwen3"), stop=stop)
    for size in (1, 3, len(ids)):
        steps = steps_of(showing)
        steps.apply(tokens(opens=[opened]))
        texts: list[Text] = []
        for first in range(0, len(ids), size):
            finish = LENGTH if first + size >= len(ids) else NONE
            texts.append(only(steps, tokens((ONE, first, ids[first : first + size], finish))))
            if texts[-1].finishes:
                break
        found = channel_texts(texts)
        texts_of = {kind: "".join(text for channel, _, text in found if channel == kind) for kind in (0, 1)}
        assert (texts_of[REASONING].rstrip(), texts_of[CONTENT].rstrip()) == (reasoning, content)
        assert finish_of(texts).stop_reason == hit


def test_a_stop_string_without_reasoning_may_begin_the_output(
    showing: PieceTable, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("\n\nHello").ids
    steps = steps_of(showing)
    steps.apply(tokens(opens=[opening(parsing=OutputParsing("qwen3"), stop=["\n\n"])]))
    text = only(steps, tokens((ONE, 0, ids, NONE)))
    assert ("".join(text.deltas), finish_of([text]).stop_reason) == ("", "\n\n")


@pytest.mark.parametrize(
    ("parsing", "output", "expected"),
    [
        (OutputParsing("deepseek_r1", prompt_end="</think>"), ", it rains", [(CONTENT, 0, ", it rains")]),
        (OutputParsing("deepseek_r1"), ", it rains", [(REASONING, 0, ", it rains")]),
        (
            OutputParsing("qwen3", prompt_end="<think>"),
            " is it?</think>\n\nOslo",
            [(1, 0, "is it?"), (0, 0, "Oslo")],
        ),
    ],
)
def test_a_continued_message_begins_the_output_of_the_parser(
    showing: PieceTable,
    tokenizer: Tokenizer,
    parsing: OutputParsing,
    output: str,
    expected: list[tuple[int, int, str]],
) -> None:
    opened = opening(prompt=tokenizer.encode("Well").ids, parsing=parsing)
    texts = run(steps_of(showing), tokenizer.encode(output).ids, opened)
    assert channel_texts(texts) == expected


@pytest.mark.parametrize("parsing", [OutputParsing("no_such"), OutputParsing("", "no_such"), OutputParsing()])
def test_an_unknown_parser_leaves_the_output_as_content(
    showing: PieceTable, tokenizer: Tokenizer, parsing: OutputParsing
) -> None:
    ids = tokenizer.encode("<think>a</think>b").ids
    texts = run(steps_of(showing), ids, opening(parsing=parsing))
    assert "".join(delta for text in texts for delta in text.deltas) == "ab"
    assert not any(text.spans for text in texts)
