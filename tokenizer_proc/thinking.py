"""``thinking_token_budget`` in token ids: what begins, ends, and must end a request's reasoning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import msgspec

from quintet.wire.channels import is_inside
from quintet.wire.config import ThinkMarks
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import SamplingParams
from quintet.wire.thinking import Thinking, ThinkingBound

FIELD = "thinking_token_budget"
AROUND = ("word\n", "\nWord")
"""What a mark is tried out between: its tokens must be the same as alone."""


class Budgets:
    """Makes the bounds of one model's requests."""

    def __init__(self, marks: ThinkMarks | None, encode: Callable[[str], list[int]]) -> None:
        """marks: None where no reasoning is read. encode: a text's ids, without any around."""
        self._marks = marks
        self._encode = encode

    def bounded(self, params: SamplingParams, prompt_end: Callable[[], str]) -> SamplingParams:
        """Return parameters whose budget, if any, the executor can enforce. Raises `RequestError`.

        ``prompt_end`` returns the end of the prompt's text: one that ends the reasoning leaves nothing to bound.
        """
        budget = params.thinking_token_budget
        if budget is None or params.thinking_bound is not None:
            return params
        if self._marks is None:
            raise _refused(
                "no reasoning is read by this server: start it with --reasoning-parser, or limit max_tokens"
            )
        prompt, marks = prompt_end().rstrip(), self._marks
        begun = None
        if prompt.endswith(tuple(marks.closes)):
            return params
        if is_inside(prompt, marks.opens, marks.closes, marks.begins_inside):
            begun = next((i for i, mark in enumerate(marks.opens) if prompt.endswith(mark)), 0)
        ways, closes = self._ids
        return msgspec.structs.replace(params, thinking_bound=ThinkingBound(budget, ways, closes, begun))

    @cached_property
    def _ids(self) -> tuple[list[Thinking], list[list[int]]]:
        marks = self._marks
        assert marks is not None
        closes = [marks.closes[min(i, len(marks.closes) - 1)] for i in range(len(marks.opens))]
        ways = [
            Thinking(self._ids_of(opened), self._encode(closed + marks.answer))
            for opened, closed in zip(marks.opens, closes, strict=True)
        ]
        return ways, [self._ids_of(mark) for mark in (*marks.closes, *marks.breaks)]

    def _ids_of(self, mark: str) -> list[int]:
        ids = self._encode(mark)
        before, after = AROUND
        beside = self._encode(before + mark + after)
        if not any(beside[i : i + len(ids)] == ids for i in range(len(beside))):
            raise _refused(
                f"the model's tokenizer writes its mark {mark!r} in different ways: limit max_tokens instead"
            )
        return ids


def _refused(reason: str) -> RequestError:
    return RequestError(ErrorCode.INVALID, f"{FIELD} cannot be enforced: {reason}.", FIELD)
