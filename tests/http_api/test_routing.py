"""What a client says of its conversation reaches the choice of an engine, and what it is told of that choice."""

from __future__ import annotations

from typing import Any

from quintet.frontend.api.routing import MAX_EXPLAINED
from quintet.wire.messages import Submit

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


def sessions_of(server: Any, path: str, body: dict[str, Any], headers: dict[str, str]) -> set[str]:
    """Ask, and return the sessions of what was submitted for it."""
    server.engine.sent.clear()
    assert server.ask("POST", path, body, headers).status == 200
    return {submit.session for submit in server.engine.wait_for(Submit)}


def test_every_round_of_a_beam_search_is_of_the_session(shared: Any) -> None:
    for path, body in ((C, {"prompt": "x"}), (H, {"messages": USER})):
        for search in ({}, {"use_beam_search": True, "n": 2}):
            asked = {**body, **search, "max_tokens": 2, "user": "u"}
            assert sessions_of(shared, path, asked, {}) == {"u"}
            assert sessions_of(shared, path, asked, {"X-Session-Id": "s"}) == {"s"}


def test_the_explanation_is_of_a_bounded_length(shared: Any) -> None:
    explain = {"X-Quintet-Explain": "1"}
    for body, num_told in (
        ({"prompt": "x"}, 1),
        ({"prompt": "x", "use_beam_search": True, "n": 2}, 1),
        ({"prompt": ["x"] * 40}, MAX_EXPLAINED + 1),
    ):
        reply = shared.ask("POST", C, {**body, "max_tokens": 1}, explain)
        words = reply.headers["x-quintet-routing"].split("; ")
        assert reply.status == 200 and len(words) == num_told
    assert words[0].startswith("engine 0: ") and words[-1] == f"and {40 - MAX_EXPLAINED} prompts more"
    assert "x-quintet-routing" not in shared.ask("POST", C, {"prompt": "x", "max_tokens": 1}).headers
