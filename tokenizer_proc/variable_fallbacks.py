"""Variables for a chat template that rejects those of a request: other reasoning efforts, and tools with all fields.

Agents send an effort with every request, and templates have their own scales: none and high, or low, medium and xhigh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAME = "reasoning_effort"
SCALE = {"none": 0, "no_think": 0, "minimal": 1, "low": 2, "medium": 3, "high": 4, "xhigh": 5, "max": 6}
"""Position of each effort."""


def with_other_efforts(variables: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """Return a template's variables with each other effort, nearest first and the higher of two, and last without one.

    Empty if the template does not read an effort, or the request's is not on the scale.
    """
    sent = variables.get(NAME)
    if NAME not in source or not isinstance(sent, str) or sent not in SCALE:
        return []
    others = [effort for effort in SCALE if effort != sent]
    others.sort(key=lambda effort: (abs(SCALE[effort] - SCALE[sent]), -SCALE[effort]))
    without = {name: value for name, value in variables.items() if name != NAME}
    return [*({**variables, NAME: effort} for effort in others), without]


def with_optional_fields(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools with a description and parameters for each function: optional in the APIs, required by some templates."""
    return [_complete(tool) for tool in tools]


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    sent = {name: value for name, value in function.items() if value is not None}
    parameters = sent.get("parameters", {})
    if isinstance(parameters, dict):
        sent["parameters"] = {"type": "object", "properties": {}, **parameters}
    return {**tool, "function": {"description": "", **sent}}
