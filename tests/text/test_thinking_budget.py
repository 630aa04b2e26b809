"""``thinking_token_budget`` in the tokenizer process: ids of the marks, and the state at the prompt's end."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer

from quintet.deploy.config.parsers import choose_parsers, with_ending
from quintet.detokenizer_proc.parsers.forced import think_marks
from quintet.detokenizer_proc.parsers.formats import REASONING
from quintet.tokenizer_proc.thinking import Budgets
from quintet.wire.config import ParsersConfig
from quintet.wire.errors import RequestError
from quintet.wire.params import SamplingParams, ThinkingBound


def budgets_of(name: str, tokenizer: Tokenizer) -> Budgets:
    return Budgets(think_marks(name), lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


def bound_of(budgets: Budgets, prompt: str, budget: int | None = 9) -> ThinkingBound | None:
    params = SamplingParams(thinking_token_budget=budget).checked()
    return budgets.bounded(params, lambda: prompt).thinking_bound


@pytest.fixture
def tokenizer(tokenizers_by_style: dict[str, Tokenizer]) -> Tokenizer:
    """Tokenizer with marks as tokens, as in reasoning models."""
    tokenizer = Tokenizer.from_str(tokenizers_by_style["byte_level"].to_str())
    marks = [
        "<think>",
        "</think>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "<|call|>",
        "<|return|>",
    ]
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return tokenizer


@pytest.mark.parametrize("name", REASONING)
def test_every_reasoning_format_is_bounded(name: str, tokenizer: Tokenizer) -> None:
    marks = think_marks(name)
    assert marks is not None
    bound = bound_of(budgets_of(name, tokenizer), "a question")
    assert bound is not None and bound.is_valid and bound.max_tokens == 9
    assert [tokenizer.decode(way.opens, skip_special_tokens=False) for way in bound.formats] == marks.opens
    forced = [tokenizer.decode(way.forced, skip_special_tokens=False) for way in bound.formats]
    assert all(text.startswith(tuple(marks.closes)) and text.endswith(marks.answer) for text in forced)
    assert bound.open_format == (0 if marks.begins_inside else None)
    opened = [bound_of(budgets_of(name, tokenizer), "a question " + mark) for mark in marks.opens]
    assert [each and each.open_format for each in opened] == [*range(len(marks.opens))]
    assert all(bound_of(budgets_of(name, tokenizer), f"{mark}\n\n") is None for mark in marks.closes)


def test_a_text_may_precede_the_closing_mark(tokenizer: Tokenizer) -> None:
    parsers = ParsersConfig(reasoning="qwen3", thinks=think_marks("qwen3"))
    config = {"reasoning_start_str": "<think>", "reasoning_end_str": "Enough of this.</think>"}
    ended, note = with_ending(parsers, config)
    budgets = Budgets(ended.thinks, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    bound = bound_of(budgets, "a question")
    assert bound is not None and note is None
    forced = tokenizer.decode(bound.formats[0].forced, skip_special_tokens=False)
    assert forced == "Enough of this.</think>"
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in bound.closes] == ["</think>"]
    for text in ("", "</think>"):
        assert with_ending(parsers, {"reasoning_end_str": text}) == (parsers, None)
    assert with_ending(ParsersConfig(), config) == (ParsersConfig(), None)
    other, note = with_ending(parsers, {"reasoning_end_str": "[/THINK]"})
    assert other == parsers and note is not None and "has no </think>" in note


def test_a_request_without_a_budget_has_no_bound(tokenizer: Tokenizer) -> None:
    assert bound_of(budgets_of("qwen3", tokenizer), "?", -1) is None
    assert bound_of(Budgets(None, lambda text: []), "?", None) is None


def test_an_unenforceable_budget_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="start it with --reasoning-parser"):
        bound_of(Budgets(None, lambda text: []), "?")
    merges = Budgets(think_marks("qwen3"), lambda text: [len(text)])
    with pytest.raises(RequestError, match="the tokens of the mark '<think>' depend on the text around it"):
        bound_of(merges, "?")


def test_a_tool_call_ends_the_budget(tokenizer: Tokenizer) -> None:
    """A closing mark forced within a call would be in its arguments. Marks with varying tokens are not found."""
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    parsers, _ = choose_parsers("qwen3", "hermes", {})
    budgets = Budgets(parsers.thinks, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    bound = bound_of(budgets, "a question")
    assert bound is not None and bound.is_valid
    assert bound.closes[0] == [tokenizer.token_to_id("</think>")]
    assert [tokenizer.token_to_id("<tool_call>")] in bound.closes


def test_a_word_that_begins_calls_does_not_end_the_budget() -> None:
    parsers, _ = choose_parsers("qwen3", "phi4_mini_json", {})
    assert parsers.thinks is not None and parsers.thinks.breaks == ["<|tool_call|>"]
