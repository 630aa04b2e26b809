"""``python -m quintet.deploy.integrations.kserve.predictor``: text generation behind KServe's inference protocols, V1
and V2, HTTP and gRPC.

For clients, transformers and loggers that speak those. Who speaks OpenAI's API wants `runtime.yaml`: the server itself, which has
that API, streams, and KServe's health paths. Needs the package ``kserve``.

    V1   {"instances": ["a prompt", {"prompt": "another", "max_tokens": 8}], "parameters": {"temperature": 0}}
         {"predictions": [{"text": "…", "finish_reason": "stop"}, …]}
    V2   a BYTES tensor ``prompt`` and sampling parameters; BYTES tensors ``text`` and ``finish_reason`` of its shape
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import get_args

import kserve
import msgspec
from kserve.errors import InvalidInput, ModelNotReady
from kserve.model_server import parser as kserve_parser
from kserve.protocol.infer_type import to_http_parameters

from quintet.deploy.config.config_file import read_config_file
from quintet.deploy.python_api.engine import EngineError
from quintet.deploy.python_api.inputs import instance_by_name, params_by_name
from quintet.deploy.python_api.offline import AsyncLLM
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import OutputKind, SamplingParams

Prompts = Sequence[tuple[str, Mapping[str, object]]]
"""Each prompt with its own sampling parameters."""

_LATER = frozenset({ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL})

_NUMBERS = frozenset(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if {*(get_args(field.type) or (field.type,))} <= {int, float, NoneType}
)
"""Parameters that are numbers: a text of digits is one there, and stays a text elsewhere."""


class TextGeneration(kserve.Model):
    """One model of KServe's, answered by an engine that is there already."""

    def __init__(self, name: str, llm: AsyncLLM) -> None:
        super().__init__(name)
        self._llm = llm
        self.ready = True

    async def healthy(self) -> bool:
        """Return whether every kind of process runs."""
        try:
            await self._llm.check_health()
        except EngineError:
            return False
        return True

    async def predict(
        self, payload: Mapping[str, object] | kserve.InferRequest, headers: Mapping[str, str] | None = None
    ) -> dict[str, object] | kserve.InferResponse:
        """Complete all prompts of a request together. Raises KServe's errors: 400 for what the client can mend, 503 for later."""
        if not isinstance(payload, kserve.InferRequest):
            ended = await self._complete(_prompts_of_v1(payload))
            return {"predictions": [{"text": text, "finish_reason": reason} for text, reason in ended]}
        shape, prompts = _prompts_of_v2(payload)
        ended = await self._complete(prompts)
        outputs = [
            kserve.InferOutput(
                name=name, shape=shape, datatype="BYTES", data=[pair[column] for pair in ended]
            )
            for column, name in enumerate(("text", "finish_reason"))
        ]
        return kserve.InferResponse(
            response_id=payload.id or str(uuid.uuid4()), model_name=self.name, infer_outputs=outputs
        )

    async def _complete(self, prompts: Prompts) -> list[tuple[str, str]]:
        """Return text and reason of each; the first mistake ends all."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete_one(*prompt)) for prompt in prompts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _complete_one(self, prompt: str, settings: Mapping[str, object]) -> tuple[str, str]:
        last = None
        try:
            async for output in self._llm.generate(prompt, params_by_name(settings, OutputKind.FINAL_ONLY)):
                last = output
        except RequestError as error:
            if error.code in _LATER:
                raise ModelNotReady(self.name, error.message) from None
            raise InvalidInput(error.message) from None
        except EngineError as error:
            raise ModelNotReady(self.name, str(error)) from None
        assert last is not None, "an answer without an ending"
        return last.outputs[0].text, last.outputs[0].finish_reason or ""


def _prompts_of_v1(payload: Mapping[str, object]) -> Prompts:
    instances, common = payload.get("instances"), payload.get("parameters", {})
    if not isinstance(instances, list) or not instances or not isinstance(common, dict):
        raise InvalidInput('send {"instances": [prompt, …], "parameters": {…}}, with one prompt at least')
    try:
        return [instance_by_name(instance, common) for instance in instances]
    except RequestError as error:
        raise InvalidInput(error.message) from None


def _prompts_of_v2(request: kserve.InferRequest) -> tuple[list[int], Prompts]:
    names = [tensor.name for tensor in request.inputs]
    if names != ["prompt"] or request.inputs[0].datatype != "BYTES":
        sent = ", ".join(f"{tensor.name} ({tensor.datatype})" for tensor in request.inputs)
        raise InvalidInput(f"the inputs are {sent or 'none'}; send one tensor `prompt` of BYTES")
    tensor = request.inputs[0]
    settings: dict[str, object] = dict(to_http_parameters(request.parameters or {}))
    if request.from_grpc:
        settings = {
            name: _as_number(value) if name in _NUMBERS else value for name, value in settings.items()
        }
    texts = tensor.as_numpy().reshape(-1).tolist()
    try:
        decoded = [text.decode() if isinstance(text, bytes) else str(text) for text in texts]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"a prompt is no UTF-8: {error}") from None
    return [int(size) for size in tensor.shape], [(text, settings) for text in decoded]


def _as_number(value: object) -> object:
    """gRPC's parameters have no fractions: ``"0.7"`` is one."""
    try:
        number = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return number if isinstance(number, int | float) else value


def main() -> None:
    """Boot the engine, serve until told to stop, end the engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[kserve_parser], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_dir", help="folder or hub name (default: the toy model)")
    parser.add_argument(
        "--config", type=Path, help="YAML file of the engine's flags, as of `quintet serve --config`"
    )
    arguments = parser.parse_args()
    flags = read_config_file(arguments.config) if arguments.config else {}
    llm = AsyncLLM(arguments.model_dir, **flags)
    try:
        kserve.ModelServer().start([TextGeneration(arguments.model_name, llm)])
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main()
