"""Memory is returned to the system after large requests only."""

from __future__ import annotations

import asyncio

import pytest

from quintet.frontend import app
from quintet.process.os_tuning import TRIM_MIN_BYTES


@pytest.mark.parametrize(("num_bytes", "num_times"), [(0, 0), (TRIM_MIN_BYTES - 1, 0), (TRIM_MIN_BYTES, 1)])
def test_memory_is_trimmed_after_large_requests(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, num_times: int
) -> None:
    trimmed: list[None] = []
    monkeypatch.setattr(app, "TRIM_DELAY_S", 0)
    monkeypatch.setattr(app, "trim_memory", lambda: trimmed.append(None))

    async def end_one() -> None:
        app.schedule_trim(num_bytes)
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(0, done.set)  # fires after an earlier timer
        await done.wait()
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(end_one())
    assert len(trimmed) == num_times
