"""Event loop of an `LLM` in a thread of its own, and its end."""

from __future__ import annotations

import asyncio
import threading

from quintet.deploy.python_api.engine import LocalServer


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, and close it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def shut_down(engine: LocalServer, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Shut down an `LLM`: fail requests in flight, stop the loop's thread, then the processes.

    The garbage collector may call it in any thread, also in the loop's own.
    """

    if not engine.is_ours:
        return

    async def stop_loop() -> None:
        try:
            engine.fail_for_shutdown()
        finally:
            engine.detach()
            await asyncio.sleep(0)  # two iterations, so that collectors deliver the errors
            await asyncio.sleep(0)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            loop.call_soon(loop.stop)

    stopping = asyncio.run_coroutine_threadsafe(stop_loop(), loop) if thread.is_alive() else None
    if stopping is not None and thread is threading.current_thread():
        stopping.add_done_callback(lambda _: engine.stop())
        return
    thread.join(5)
    engine.stop()
    if stopping is not None and stopping.done():
        stopping.result()
