"""Conversion of ``thinking_token_budget`` to token ids: the sequences that open and close a request's reasoning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import msgspec

from quintet.wire.channels import is_inside
from quintet.wire.config import ThinkMarks
from quintet.wire.errors import RequestError, invalid
from quintet.wire.params import SamplingParams, Thinking, ThinkingBound

FIELD = "thinking_token_budget"
AROUND = ("word\n", "\nWord")
"""Context in which a mark must have the same tokens as alone."""


class Budgets:
    """Builds the thinking bounds of one model's requests."""

    def __init__(self, marks: ThinkMarks | None, encode: Callable[[str], list[int]]) -> None:
        """``marks``: None without a reasoning parser. ``encode`` returns a text's ids without special tokens."""
        self._marks = marks
        self._encode = encode

    def bounded(self, params: SamplingParams, prompt_end: Callable[[], str]) -> SamplingParams:
        """Return parameters with the budget, if any, converted to token ids. Raises `RequestError`.

        ``prompt_end`` returns the end of the prompt's text. A prompt that already closes the reasoning needs no bound.
        """
        budget = params.thinking_token_budget
        if budget is None or params.thinking_bound is not None:
            return params
        if self._marks is None:
            raise _refused(
                "this server has no reasoning parser: start it with --reasoning-parser, or limit max_tokens"
            )
        prompt, marks = prompt_end().rstrip(), self._marks
        opened_by = None
        if prompt.endswith(tuple(marks.closes)):
            return params
        if is_inside(prompt, marks.opens, marks.closes, marks.begins_inside):
            opened_by = next((i for i, mark in enumerate(marks.opens) if prompt.endswith(mark)), 0)
        sequences, closes = self._ids
        return msgspec.structs.replace(
            params, thinking_bound=ThinkingBound(budget, sequences, closes, opened_by)
        )

    @cached_property
    def _ids(self) -> tuple[list[Thinking], list[list[int]]]:
        marks = self._marks
        assert marks is not None
        closes = [marks.closes[min(i, len(marks.closes) - 1)] for i in range(len(marks.opens))]
        sequences = [
            Thinking(self._ids_of(opened), self._encode(marks.ending + closed + marks.answer))
            for opened, closed in zip(marks.opens, closes, strict=True)
        ]
        breaks = [ids for mark in marks.breaks if (ids := self._constant_ids(mark)) is not None]
        return sequences, [*map(self._ids_of, marks.closes), *breaks]

    def _ids_of(self, mark: str) -> list[int]:
        ids = self._constant_ids(mark)
        if ids is None:
            raise _refused(
                f"the tokens of the mark {mark!r} depend on the text around it: limit max_tokens instead"
            )
        return ids

    def _constant_ids(self, mark: str) -> list[int] | None:
        """Return the tokens of a mark; None if they depend on the text around it."""
        ids = self._encode(mark)
        before, after = AROUND
        in_context = self._encode(before + mark + after)
        is_constant = any(in_context[i : i + len(ids)] == ids for i in range(len(in_context)))
        return ids if is_constant else None


def _refused(reason: str) -> RequestError:
    return invalid(f"{FIELD} cannot be enforced: {reason}.", FIELD)
