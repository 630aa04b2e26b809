"""``LLMEngine``: a loop of the caller, as in vLLM's examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quintet import LLMEngine, RequestOutput, SamplingParams
from quintet.deploy.python_api.offline import EngineError
from quintet.wire.errors import RequestError
from quintet.wire.params import OutputKind


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(executor="mock", step_ms=2.0, max_model_len=512) as engine:
        yield engine
    assert engine.get_num_unfinished_requests() == 0
    with pytest.raises(EngineError):
        engine.add_request("late", "x")


def params(max_tokens: int = 20, kind: OutputKind = OutputKind.CUMULATIVE, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, seed=3, output_kind=kind)


def drive(engine: LLMEngine) -> list[RequestOutput]:
    found: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert outputs and len({output.request_id for output in outputs}) == len(outputs)
        found += outputs
    return found


def test_loop_runs_every_request_to_its_end(engine: LLMEngine) -> None:
    """Requests may be added at any time, and end in separate steps."""
    waiting = [(str(i), f"def f{i}():", 4 + 3 * i) for i in range(6)]
    ended: dict[str, RequestOutput] = {}
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            name, prompt, length = waiting.pop()
            engine.add_request(name, prompt, params(length))
        for output in engine.step():
            assert output.request_id not in ended
            if output.finished:
                ended[output.request_id] = output
        num_steps += 1
    assert engine.step() == [] and num_steps > 6
    for i in range(6):
        (only,) = ended[str(i)].outputs
        assert (len(only.token_ids), only.finish_reason) == (4 + 3 * i, "length")
        assert ended[str(i)].prompt == f"def f{i}():"


def test_the_three_kinds_of_output_agree(engine: LLMEngine) -> None:
    for kind in OutputKind:
        engine.add_request(kind.name, "import os", params(100, kind))
    found = drive(engine)
    by_kind = {kind: [each for each in found if each.request_id == kind.name] for kind in OutputKind}
    (final,) = by_kind[OutputKind.FINAL_ONLY]
    assert len(by_kind[OutputKind.CUMULATIVE]) > 2
    assert by_kind[OutputKind.CUMULATIVE][-1].outputs[0].token_ids == final.outputs[0].token_ids
    pieces = [output.outputs[0] for output in by_kind[OutputKind.DELTA]]
    assert [token for piece in pieces for token in piece.token_ids] == final.outputs[0].token_ids
    assert "".join(piece.text for piece in pieces) == final.outputs[0].text


def test_aborted_request_has_no_more_outputs(engine: LLMEngine) -> None:
    for name in ("a", "b", "c"):
        engine.add_request(name, "x", params(60))
    engine.step()
    engine.abort_request(["a", "unknown"])
    engine.abort_request("b")
    assert engine.get_num_unfinished_requests() == 1
    assert {output.request_id for output in drive(engine)} == {"c"}
    engine.add_request("a", "x", params(3, n=2))  # its id is free again
    assert [len(output.outputs) for output in drive(engine)][-1] == 2


def test_invalid_requests_raise(engine: LLMEngine) -> None:
    engine.add_request("a", "x", params(5))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("a", "x")
    with pytest.raises(TypeError, match="request_id is 5"):
        engine.add_request(5, "x")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="temperature"):
        engine.add_request("b", "x", SamplingParams(temperature=9.0))
    engine.add_request("c", [7] * 600, params(5))
    ended = {output.request_id: output.error for output in drive(engine) if output.finished}
    assert ended["a"] is None and ended["c"] is not None and "maximum context length" in ended["c"].message
