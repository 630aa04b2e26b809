"""``python -m quintet.deploy.integrations.kserve.predictor``: KServe predictor for protocols V1 and V2, HTTP and gRPC.

For the OpenAI API and streaming, use `runtime.yaml` instead, which runs the server with KServe's health endpoints. Requires the
package ``kserve``.

    V1   {"instances": ["a prompt", {"prompt": "another", "max_tokens": 8}], "parameters": {"temperature": 0}}
         {"predictions": [{"text": "…", "finish_reason": "stop"}, …]}
    V2   input: a BYTES tensor ``prompt`` and sampling parameters
         output: BYTES tensors ``text`` and ``finish_reason`` of the same shape
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import kserve
import msgspec
from kserve.errors import InvalidInput, ModelNotReady
from kserve.model_server import parser as kserve_parser
from kserve.protocol.infer_type import to_http_parameters
from msgspec import inspect

from quintet.deploy.config.flag_table import read_config_file
from quintet.deploy.python_api.engine import EngineError
from quintet.deploy.python_api.inputs import instance_by_name, params_by_name
from quintet.deploy.python_api.offline import AsyncLLM
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.params import OutputKind, SamplingParams

Prompts = Sequence[tuple[str, Mapping[str, object]]]
"""Prompts with sampling parameters."""

_LATER = frozenset({ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL})


def _is_number(type_: inspect.Type) -> bool:
    if isinstance(type_, inspect.Metadata):
        return _is_number(type_.type)
    if isinstance(type_, inspect.UnionType):
        return all(map(_is_number, type_.types))
    return isinstance(type_, inspect.IntType | inspect.FloatType | inspect.NoneType)


_NUMBERS = frozenset(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if _is_number(inspect.type_info(field.type))
)
"""Numeric parameters, for which strings are converted to numbers."""


class TextGeneration(kserve.Model):
    """KServe model backed by a running engine."""

    def __init__(self, name: str, llm: AsyncLLM) -> None:
        super().__init__(name)
        self._llm = llm
        self.ready = True

    async def healthy(self) -> bool:
        """Return whether all process roles are running."""
        try:
            await self._llm.check_health()
        except EngineError:
            return False
        return True

    async def predict(
        self, payload: Mapping[str, object] | kserve.InferRequest, headers: Mapping[str, str] | None = None
    ) -> dict[str, object] | kserve.InferResponse:
        """Complete all prompts of a request. Raises KServe errors: 400 for invalid requests, 503 for temporary failures."""
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
        """Return text and finish reason per prompt; the first error cancels all."""
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
        assert last is not None, "a response without an end"
        return last.outputs[0].text, last.outputs[0].finish_reason or ""


def _prompts_of_v1(payload: Mapping[str, object]) -> Prompts:
    instances, common = payload.get("instances"), payload.get("parameters", {})
    if not isinstance(instances, list) or not instances or not isinstance(common, dict):
        raise InvalidInput('send {"instances": [prompt, …], "parameters": {…}} with at least one prompt')
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
        raise InvalidInput(f"a prompt is not valid UTF-8: {error}") from None
    return [int(size) for size in tensor.shape], [(text, settings) for text in decoded]


def _as_number(value: object) -> object:
    """Convert a string to a number: gRPC parameters have no floats, so ``"0.7"`` is one."""
    try:
        number = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return number if isinstance(number, int | float) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[kserve_parser], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_dir", help="folder or hub name (default: the toy model)")
    parser.add_argument(
        "--config", type=Path, help="YAML file of engine flags, as for `quintet serve --config`"
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
