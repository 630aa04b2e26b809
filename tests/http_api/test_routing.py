"""Session ids reach the load balancer; the routing explanation has a bounded length."""

from __future__ import annotations

from typing import Any

from quintet.frontend.api.answer import MAX_EXPLAINED
from quintet.wire.messages import Submit

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


def sessions_of(server: Any, path: str, body: dict[str, Any], headers: dict[str, str]) -> set[str]:
    """Send a request and return the session ids of its submits."""
    server.engine.sent.clear()
    assert server.ask("POST", path, body, headers).status == 200
    return {submit.session for submit in server.engine.wait_for(Submit)}


def test_every_round_of_a_beam_search_has_the_session_id(shared: Any) -> None:
    for path, body in ((C, {"prompt": "x"}), (H, {"messages": USER})):
        for search in ({}, {"use_beam_search": True, "n": 2}):
            request = {**body, **search, "max_tokens": 2, "user": "u"}
            assert sessions_of(shared, path, request, {}) == {"u"}
            request |= {"session_id": "i"}
            assert sessions_of(shared, path, request, {}) == {"i"}
            assert sessions_of(shared, path, request, {"X-Session-Id": "s"}) == {"s"}


def test_the_routing_explanation_is_bounded(shared: Any) -> None:
    explain = {"X-Quintet-Explain": "1"}
    for body, num_words in (
        ({"prompt": "x"}, 1),
        ({"prompt": "x", "use_beam_search": True, "n": 2}, 1),
        ({"prompt": ["x"] * 40}, MAX_EXPLAINED + 1),
    ):
        reply = shared.ask("POST", C, {**body, "max_tokens": 1}, explain)
        words = reply.headers["x-quintet-routing"].split("; ")
        assert reply.status == 200 and len(words) == num_words
    assert words[0].startswith("engine 0: ") and words[-1] == f"and {40 - MAX_EXPLAINED} prompts more"
    assert "x-quintet-routing" not in shared.ask("POST", C, {"prompt": "x", "max_tokens": 1}).headers
