"""Reasoning of a chat request: switches of other servers' APIs, and the reasoning of a message to be continued.

The switches are translated to ``enable_thinking`` and ``reasoning_effort``.
"""

from __future__ import annotations

from quintet.frontend.api.openai.types import ChatBody, ReasoningChoice
from quintet.wire.config import ThinkMarks

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


def last_mark(text: str, marks: ThinkMarks | None) -> str:
    """Return the mark of reasoning that applies at the end of a message to be continued; empty if the message is empty.

    The closing mark also stands for a text without marks: it belongs to the answer.
    """
    if marks is None or not text.strip():
        return ""
    opened = max(marks.opens, key=text.rfind)
    is_open = text.rfind(opened) > max(map(text.rfind, marks.closes))
    return opened if is_open else marks.closes[0]
