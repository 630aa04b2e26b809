"""Reasoning switches of other servers' chat APIs, translated to ``enable_thinking`` and ``reasoning_effort``."""

from __future__ import annotations

from quintet.frontend.api.openai.types import ChatBody, ReasoningChoice

OFF = ("none", "disabled", "off", "false")
"""Values that turn reasoning off; others turn it on."""


def read_reasoning(body: ChatBody) -> None:
    """Set the fields of a body by its ``thinking`` and ``reasoning``. The fields themselves take precedence."""
    for choice in (body.thinking, body.reasoning):
        if isinstance(choice, ReasoningChoice):
            body.reasoning_effort = body.reasoning_effort or choice.effort
            body.include_reasoning = False if choice.exclude else body.include_reasoning
        if body.enable_thinking is None:
            body.enable_thinking = _turns_on(choice)


def _turns_on(choice: ReasoningChoice | bool | str | None) -> bool | None:
    if isinstance(choice, ReasoningChoice):
        choice = choice.type or choice.effort if choice.enabled is None else choice.enabled
    return choice not in OFF if isinstance(choice, str) else choice
