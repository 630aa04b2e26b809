"""``AsyncLLM``: three kinds of streaming, abort, health, one event loop at a time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from quintet import AsyncLLM, SamplingParams
from quintet.deploy.python_api import engine
from quintet.deploy.python_api.offline import EngineError, RequestOutput
from quintet.wire.errors import RequestError
from quintet.wire.params import OutputKind


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(executor="mock", step_ms=2.0, max_model_len=512)
    yield llm
    llm.shutdown()


def params(kind: OutputKind, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=3, output_kind=kind)


async def collect(llm: AsyncLLM, kind: OutputKind, max_tokens: int = 12) -> list[RequestOutput]:
    return [output async for output in llm.generate("import os", params(kind, max_tokens))]


def test_the_three_kinds_of_output_agree(llm: AsyncLLM) -> None:
    num_tokens = 200  # 400 ms of steps: a reader that pauses briefly receives only a part at once

    async def main() -> None:
        cumulative = await collect(llm, OutputKind.CUMULATIVE, num_tokens)
        deltas = await collect(llm, OutputKind.DELTA, num_tokens)
        final = await collect(llm, OutputKind.FINAL_ONLY, num_tokens)
        (last,) = final
        assert last.finished and last.outputs[0].finish_reason == "length"
        text, ids = last.outputs[0].text, last.outputs[0].token_ids
        assert len(ids) == num_tokens and last.prompt == "import os" and last.prompt_token_ids
        assert "".join(output.outputs[0].text for output in deltas) == text
        assert [token for output in deltas for token in output.outputs[0].token_ids] == ids
        assert cumulative[-1].outputs[0].text == text and cumulative[-1].outputs[0].token_ids == ids
        lengths = [len(output.outputs[0].token_ids) for output in cumulative]
        assert lengths == sorted(lengths) and len(cumulative) > 1 and len(deltas) > 1
        assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]

    asyncio.run(main())


def test_concurrent_requests_on_a_second_loop(llm: AsyncLLM) -> None:
    async def main() -> list[list[RequestOutput]]:
        return list(
            await asyncio.gather(*(collect(llm, OutputKind.FINAL_ONLY, 5 + i % 7) for i in range(100)))
        )

    outputs = asyncio.run(main())
    assert [len(final[0].outputs[0].token_ids) for final in outputs] == [5 + i % 7 for i in range(100)]
    assert llm._streams == {} and llm._engine.requests.num_live == 0


def test_abort_ends_a_request_with_its_tokens_so_far(llm: AsyncLLM) -> None:
    async def main() -> None:
        seen = []
        async for output in llm.generate("x", params(OutputKind.CUMULATIVE, 400), "mine"):
            seen.append(output)
            if len(seen) == 1:
                with pytest.raises(ValueError, match="'mine' is in use"):
                    await anext(llm.generate("y", params(OutputKind.DELTA), "mine"))
                await llm.abort("mine")
                await llm.abort("unknown")
        assert seen[-1].finished and seen[-1].request_id == "mine"
        assert seen[-1].outputs[0].finish_reason == "abort"
        assert 0 < len(seen[-1].outputs[0].token_ids) < 400

    asyncio.run(main())


def test_abort_before_first_token_frees_the_id(llm: AsyncLLM) -> None:
    async def one() -> RequestOutput:
        return [o async for o in llm.generate("x", params(OutputKind.CUMULATIVE, 400), "mine")][-1]

    async def main() -> None:
        first, second = asyncio.create_task(one()), asyncio.create_task(one())
        with pytest.raises(ValueError, match="'mine' is in use"):
            await second
        await llm.abort("mine")
        output = await asyncio.wait_for(first, 10)
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert llm._streams == {}

    asyncio.run(main())


@pytest.mark.parametrize("num_words", [20_000, 200_000])
def test_abort_while_a_long_prompt_is_encoded(llm: AsyncLLM, num_words: int) -> None:
    """Includes a prompt that turns out to be too long."""

    async def one() -> list[RequestOutput]:
        long = "hello " * num_words
        sampling = SamplingParams(truncate_prompt_tokens=-1 if num_words == 20_000 else None, max_tokens=9)
        return [output async for output in llm.generate(long, sampling, "mine")]

    async def main() -> None:
        running = asyncio.create_task(one())
        while "mine" not in llm._streams:
            await asyncio.sleep(0)
        await llm.abort("mine")
        output = (await asyncio.wait_for(running, 20))[-1]
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert llm._streams == {}

    asyncio.run(main())


def test_breaking_or_cancelling_aborts_the_request(llm: AsyncLLM) -> None:
    async def until_idle() -> None:
        async with asyncio.timeout(10):
            while llm._engine.requests.num_live:
                await asyncio.sleep(0)

    async def main() -> None:
        async with contextlib.aclosing(llm.generate("x", params(OutputKind.DELTA, 400))) as outputs:
            await anext(outputs)
        await until_idle()
        task = asyncio.create_task(collect(llm, OutputKind.FINAL_ONLY, 400))
        while not llm._streams:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle()
        assert llm._streams == {}

    asyncio.run(main())


def test_errors_name_the_parameter(llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="512"):
            await anext(llm.generate(list(range(5, 905)), params(OutputKind.DELTA)))
        with pytest.raises(RequestError, match=r"top_p is 3"):
            await anext(llm.generate("x", SamplingParams(top_p=3.0)))
        with pytest.raises(RequestError, match="conversation is empty"):
            await anext(llm.chat([]))
        with pytest.raises(RequestError, match=r"prompt contains the lone surrogate"):
            await anext(llm.generate("\ud83d"))
        with pytest.raises(RequestError, match=r"messages contains the lone surrogate"):
            await anext(llm.chat([{"role": "user", "content": "\ud83d"}]))
        with pytest.raises(RequestError, match="top_k"):
            await anext(llm.generate("x", SamplingParams(top_k=10**30)))
        with pytest.raises(RequestError, match="priority"):
            await anext(llm.generate("x", priority=10**30))
        assert llm._streams == {} and llm._engine.requests.num_live == 0

    asyncio.run(main())


def test_chat_and_codec(llm: AsyncLLM) -> None:
    async def main() -> None:
        messages = [{"role": "user", "content": "hello there"}]
        outputs = [output async for output in llm.chat(messages, params(OutputKind.FINAL_ONLY))]
        assert "hello there" in await llm.decode(outputs[0].prompt_token_ids)
        assert await llm.decode(await llm.encode("a b c")) == "a b c"
        await llm.check_health()

    asyncio.run(main())


def test_each_choice_is_returned_once(llm: AsyncLLM) -> None:
    async def main() -> None:
        sampling = SamplingParams(n=3, max_tokens=6, ignore_eos=True, seed=5, output_kind=OutputKind.DELTA)
        ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
        finishes = []
        async for output in llm.generate("x", sampling):
            for choice in output.outputs:
                ids[choice.index] += choice.token_ids
                finishes += [choice.index] if choice.finished else []
        assert [len(tokens) for tokens in ids.values()] == [6, 6, 6]
        assert sorted(finishes) == [0, 1, 2]

    asyncio.run(main())


def test_second_open_loop_is_rejected(llm: AsyncLLM) -> None:
    other = asyncio.new_event_loop()
    try:
        other.run_until_complete(llm.check_health())
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(llm.check_health())
    finally:
        other.close()


def test_context_manager_and_lost_engine() -> None:
    async def main() -> None:
        async with AsyncLLM(executor="mock", step_ms=20.0) as llm:
            outputs = llm.generate("x", params(OutputKind.DELTA, 400))
            await anext(outputs)
            llm._engine._supervisor.process.kill()
            with pytest.raises(RequestError, match="stopped"):
                async for _ in outputs:
                    pass
            with pytest.raises(EngineError, match="stopped"):
                await llm.check_health()
        with pytest.raises(EngineError, match="shut down"):
            await llm.check_health()

    asyncio.run(main())


def test_shutdown_ends_running_requests_and_ids_are_free_again_after_an_end() -> None:
    async def main() -> None:
        llm = AsyncLLM(executor="mock", step_ms=20.0)
        run_dir = Path(llm._engine.config.run_dir)
        for _ in range(2):
            outputs = [o async for o in llm.generate("x", params(OutputKind.FINAL_ONLY, 2), "same")]
            assert outputs[-1].finished and outputs[-1].request_id == "same"
        running = llm.generate("x", params(OutputKind.DELTA, 400), "same")
        await anext(running)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(RequestError, match="shut down"):
            async for _ in running:
                pass
        with pytest.raises(EngineError, match="shut down"):
            await anext(llm.generate("x"))
        await llm.abort("same")
        assert llm._streams == {} and not run_dir.exists()

    asyncio.run(main())


@pytest.mark.parametrize("thread", ["the loop's", "another"])
def test_a_collected_engine_leaves_the_loop(thread: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(executor="mock")
        assert (await collect(llm, OutputKind.FINAL_ONLY, 1))[-1].finished
        server, finalizer = llm._engine, llm._shutdown
        if thread == "another":
            await asyncio.to_thread(finalizer)
            await asyncio.sleep(0)
        else:
            del llm
            gc.collect()
        assert not finalizer.alive
        assert server._timer is not None and server._timer.cancelled() and server._loop is None
        assert not Path(server.config.run_dir).exists()

    asyncio.run(main())


def test_internal_error_is_raised_and_shutdown_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise LookupError("internal error")

    async def main() -> None:
        llm = AsyncLLM(executor="mock")
        run_dir = Path(llm._engine.config.run_dir)
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine.requests, "submit", fail)
            with pytest.raises(LookupError, match="internal error"):
                await anext(llm.generate("x", request_id="mine"))
        assert [o async for o in llm.generate("x", request_id="mine")][-1].finished
        monkeypatch.setattr(llm._engine.requests, "fail_all", fail)
        with pytest.raises(LookupError, match="internal error"):
            llm.shutdown()
        assert not run_dir.exists()

    asyncio.run(main())


def test_configuration_notes_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def resolved(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(config=None, notes=["a sampling default of the generation config is ignored"])

    monkeypatch.setattr(engine, "resolve", resolved)
    with pytest.raises(AttributeError):  # no configuration to continue with
        AsyncLLM()
    assert [record.getMessage() for record in caplog.records] == resolved().notes
