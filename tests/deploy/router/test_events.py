"""Events of relayed streams, and silence of streams."""

from __future__ import annotations

from tests.deploy.router.test_router import DONE, event, run

from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ConnectionPool
from quintet.deploy.router.events import Events
from quintet.frontend.api import sse


def test_events_are_reassembled_from_any_chunks() -> None:
    trouble_of = event(0) + b": keep-alive\n" + event(1) + DONE
    plain = event(0, ids=False) + b": keep-alive\n" + event(1, ids=False) + DONE
    for size in (1, 7, 64, len(trouble_of)):
        events, response = Events(is_relayed=True), b""
        for at in range(0, len(trouble_of), size):
            piece = events.take(trouble_of[at : at + size])
            assert not piece or piece.endswith(b"\n")
            response += piece
        assert response == plain and events.is_over
        assert events.take_resume_state() == ("a1-b2", "2", [[100, 101]])
    assert Events(is_relayed=False).take(b": keep-alive\n") == b": keep-alive\n"
    assert Events(is_relayed=False).take_resume_state() is None


def test_an_idle_stream_has_not_started() -> None:
    events = Events(is_relayed=True)
    for silence in (sse.KEEP_ALIVE, sse.KEEP_ALIVE_WITH_IDS, sse.KEEP_ALIVE_EVENT):
        assert events.take(silence) == silence and not events.has_started
    assert events.take(event(0)) and events.has_started


def test_keep_alive_comments_are_no_progress() -> None:
    async def scenario() -> None:
        lines = ConnectionPool(Target.parse("http://127.0.0.1:1"), 1.0)
        ping = b'event: ping\ndata: {"type": "ping"}\n\n'
        for piece in (b": keep-alive\n", b": ping\n\n", ping, sse.KEEP_ALIVE_EVENT):
            lines.record_chunk(piece, 1.0)
            assert (lines.last_received_s, lines.last_event_s) == (1.0, 0.0)
        for piece in (event(0), b": ping\n\ndata: {}\n\n", b"data: {}\n\n"):
            lines.last_event_s = 0.0
            lines.record_chunk(piece, 1.0)
            assert lines.last_event_s == 1.0

    run(scenario())
