"""Large exchanges have memory given back; others do not ask for it."""

from __future__ import annotations

import asyncio

import pytest

from quintet.frontend import app
from quintet.process.os_tuning import TRIM_MIN_BYTES


@pytest.mark.parametrize(("num_bytes", "num_times"), [(0, 0), (TRIM_MIN_BYTES - 1, 0), (TRIM_MIN_BYTES, 1)])
def test_memory_is_given_back_behind_what_is_large(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, num_times: int
) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(app, "TRIM_DELAY_S", 0)
    monkeypatch.setattr(app, "trim_memory", lambda: given_back.append(None))

    async def end_one() -> None:
        app.schedule_trim(num_bytes)
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(0, passed.set)  # fires behind a timer that was set before
        await passed.wait()
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(end_one())
    assert len(given_back) == num_times
