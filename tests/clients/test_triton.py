"""The model of Triton's Python backend with a real engine and a fake Triton, which no package contains."""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quintet.deploy.python_api.offline import LLM
from quintet.wire.params import SamplingParams

FOLDER = Path(__file__).parents[2] / "deploy" / "integrations" / "triton" / "quintet"
FINAL = 1
DEADLINE_S = 60.0


class Tensor:
    def __init__(self, name: str, values: Any) -> None:
        self.name, self._values = name, values

    def as_numpy(self) -> Any:
        return self._values


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, INTERNAL = "invalid", "unavailable", "internal"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Response:
    output_tensors: list[Tensor]
    error: TritonError | None = None


@dataclass
class Request:
    """Fake request with its response sender."""

    inputs: dict[str, str]
    cancels_after: int = 1_000_000
    sent: list[Response] = field(default_factory=list)
    ended: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        return len(self.sent) >= self.cancels_after

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        if response is not None:
            self.sent.append(response)
        if flags == FINAL:
            self.ended.put(flags)

    def texts(self) -> list[tuple[str, str]]:
        assert self.ended.get(timeout=DEADLINE_S) == FINAL
        return [
            (
                response.output_tensors[0].as_numpy()[0].decode(),
                response.output_tensors[1].as_numpy()[0].decode(),
            )
            for response in self.sent
        ]


def _tensor_of(request: Request, name: str) -> Tensor | None:
    text = request.inputs.get(name)
    return None if text is None else Tensor(name, np.array([text.encode()], dtype=np.object_))


def _backend() -> ModuleType:
    backend = ModuleType("triton_python_backend_utils")
    names = SimpleNamespace(
        Tensor=Tensor, InferenceResponse=Response, TritonError=TritonError,
        get_input_tensor_by_name=_tensor_of, TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )  # fmt: skip
    vars(backend).update(vars(names))
    return backend


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    sys.modules["triton_python_backend_utils"] = _backend()
    try:
        spec = importlib.util.spec_from_file_location("triton_model", FOLDER / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.modules["triton_python_backend_utils"]
    pairs = re.findall(
        r'parameters \{ key: "(\w+)" value \{ string_value: "(.*)" \} \}',
        (FOLDER / "config.pbtxt").read_text(),
    )
    parameters = {name: {"string_value": value} for name, value in pairs}
    assert parameters.keys() == {"model", "flags"}
    parameters["flags"] = {"string_value": "{kv_cache_memory: 64MiB, max_model_len: 512}"}
    model = module.TritonPythonModel()
    model.initialize({"model_config": json.dumps({"parameters": parameters})})
    yield model
    model.finalize()


@pytest.mark.whole
def test_whole_and_streamed_responses(model: Any) -> None:
    prompts = ["def f(x):", "class Stack:"]
    sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    with LLM(kv_cache_memory="64MiB", max_model_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    whole = [Request({"prompt": prompt, "sampling": json.dumps(sampling)}) for prompt in prompts]
    streamed = Request({"prompt": prompts[0], "sampling": json.dumps(sampling | {"stream": True})})
    model.execute([*whole, streamed])
    assert [request.texts() for request in whole] == [[(text, "length")] for text in expected]
    pieces = streamed.texts()
    assert "".join(text for text, _ in pieces) == expected[0] and len(pieces) > 2
    assert [reason for _, reason in pieces if reason] == ["length"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("sampling", "message_part"),
    [
        ("nonsense", "sampling is not valid JSON"),
        ("[1]", "send a JSON object"),
        ('{"beams": 2}', "beams is not a supported parameter"),
        ('{"temperature": -1}', "temperature"),
    ],
)
def test_invalid_sampling_is_an_invalid_argument(model: Any, sampling: str, message_part: str) -> None:
    request = Request({"prompt": "x", "sampling": sampling})
    model.execute([request])
    assert request.ended.get(timeout=DEADLINE_S) == FINAL
    [response] = request.sent
    assert response.error is not None
    assert (response.error.code, response.output_tensors) == (TritonError.INVALID_ARG, [])
    assert message_part in str(response.error)


@pytest.mark.whole
def test_cancelled_request_ends(model: Any) -> None:
    request = Request(
        {"prompt": "x", "sampling": '{"max_tokens": 400, "ignore_eos": true, "stream": true}'},
        cancels_after=2,
    )
    model.execute([request])
    assert len(request.texts()) == 2
