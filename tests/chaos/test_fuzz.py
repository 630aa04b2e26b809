"""Invalid frames and requests end no process."""

import re

import pytest

from ..processes.server import Server, serve, wait_until
from .fuzz import fuzz

SEED = 20261121
BODY = {"prompt": "Once upon a time", "max_tokens": 32, "seed": 11, "stream": False}


def num_dropped(server: Server, why: str) -> float:
    """Return the number of frames that all processes dropped for one reason."""
    _, text = server.get("/metrics")
    pattern = rf'^quintet:rejected_frames_total{{[^}}]*reason="{why}"[^}}]*}} (\S+)$'
    return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


def answer(server: Server) -> str:
    status, body = server.post("/v1/completions", BODY)
    assert status == 200, body
    text: str = body["choices"][0]["text"]
    return text


@pytest.mark.parametrize("duration_s", [3.0, pytest.param(10.0, marks=pytest.mark.whole)])
def test_invalid_input_ends_no_process(duration_s: float) -> None:
    with serve("--executor", "mock", "--max-model-len", "512", "--drain-timeout", "5") as server:
        before, text = {name: child.pid for name, child in server.children().items()}, answer(server)
        web = fuzz(server, duration_s, SEED)
        log = "\n".join(server.lines[-60:])
        assert {name: child.pid for name, child in server.children().items()} == before, log
        assert not web.wrong, (web.wrong[0], log)
        assert answer(server) == text
        assert web.statuses[200] and web.statuses[400], "no request was answered"
        for why in ("forged", "unreadable", "invalid"):
            wait_until(lambda why=why: num_dropped(server, why) > 0, f"a frame that is {why}")  # type: ignore[misc]
        assert server.stop() == 0
