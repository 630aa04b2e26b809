"""Requests and answers as recorded in ``bodies/``, compared field by field.

Ids come from ``request_id``; times are 0 in the files.
"""

import json
from pathlib import Path
from typing import Any

import pytest

TIMES = ("created", "created_at")
BODIES = sorted((Path(__file__).parent / "bodies").glob("*.json"))


def without_time(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: 0 if key in TIMES else without_time(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_time(item) for item in value]
    return value


def test_bodies_are_recorded() -> None:
    assert len(BODIES) > 30


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_an_answer_equals_the_recorded_one(shared: Any, path: Path) -> None:
    recorded = json.loads(path.read_text())
    method = "GET" if recorded["request"] is None else "POST"
    reply = shared.ask(method, recorded["path"], recorded["request"])
    assert reply.status == recorded["status"]
    if "events" in recorded:
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert without_time(reply.events) == recorded["events"]
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert reply.body.count(b"data: [DONE]") == 1
    else:
        assert reply.headers["content-type"] == "application/json"
        assert without_time(reply.json) == recorded["body"]
