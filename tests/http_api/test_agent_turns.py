"""Turns that agents send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http_api.chat_prompts import H, M, R, prompt_of

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("high", True)])
def test_an_effort_turns_reasoning_on_or_off(shared: Any, effort: str, thinks: bool) -> None:
    switches = {"enable_thinking": thinks, "thinking": thinks}
    for path, body in (
        (H, {"messages": HELLO, "reasoning_effort": effort}),
        (R, {"input": HELLO, "reasoning": {"effort": effort}}),
    ):
        assert json.loads(prompt_of(shared, path, body).template_kwargs) == {
            "reasoning_effort": effort,
            **switches,
        }
    own = {"messages": HELLO, "reasoning_effort": effort, "chat_template_kwargs": {"thinking": not thinks}}
    used = json.loads(prompt_of(shared, H, own).template_kwargs)
    assert used == {"reasoning_effort": effort, "thinking": not thinks}


def test_disabled_thinking_takes_precedence_over_an_effort(shared: Any) -> None:
    body = {"messages": HELLO, "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    used = json.loads(prompt_of(shared, M, body).template_kwargs)
    assert used == {"reasoning_effort": "high", "enable_thinking": False, "thinking": False}
