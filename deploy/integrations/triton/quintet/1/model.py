"""Text generation model of Triton's Python backend, in decoupled mode: one or several responses per request.

``config.pbtxt`` in the parent folder defines inputs and outputs. The engine runs in its own processes; requests are tasks on an
event loop in a background thread.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

from quintet.deploy.python_api.inputs import params_by_name
from quintet.deploy.python_api.offline import AsyncLLM
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.params import OutputKind

_LATER = frozenset({ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE})


class TritonPythonModel:
    """Model class; the backend requires this name."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine. Raises `ConfigError` for invalid flags."""
        parameters = json.loads(args["model_config"]).get("parameters", {})
        settings = {name: value["string_value"] for name, value in parameters.items()}
        self._llm = AsyncLLM(
            settings.get("model") or None, **(yaml.safe_load(settings.get("flags", "")) or {})
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quintet-triton", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start the requests; responses go through each request's sender."""
        for request in requests:
            prompt = _text(pb_utils.get_input_tensor_by_name(request, "prompt"))
            sampling = pb_utils.get_input_tensor_by_name(request, "sampling")
            settings = "{}" if sampling is None else _text(sampling)
            asyncio.run_coroutine_threadsafe(
                self._answer(prompt, settings, request.get_response_sender()), self._loop
            )

    async def _answer(self, prompt: str, sampling: str, sender: Any) -> None:
        try:
            await self._send(prompt, sampling, sender)
        except RequestError as error:
            kind = (
                pb_utils.TritonError.UNAVAILABLE if error.code in _LATER else pb_utils.TritonError.INVALID_ARG
            )
            _end(sender, pb_utils.TritonError(error.message, kind))
        except Exception as error:  # Triton's client must receive a final response
            _end(sender, pb_utils.TritonError(f"internal server error: {error!r}"))
            raise

    async def _send(self, prompt: str, sampling: str, sender: Any) -> None:
        settings = _read(sampling)
        is_streamed = settings.pop("stream", False) is True
        params = params_by_name(settings, OutputKind.DELTA if is_streamed else OutputKind.FINAL_ONLY)
        async with aclosing(self._llm.generate(prompt, params)) as outputs:
            async for output in outputs:
                if sender.is_cancelled():
                    break  # closing the iterator aborts the request
                [choice] = output.outputs
                sender.send(
                    pb_utils.InferenceResponse(
                        output_tensors=[
                            _tensor("text", choice.text),
                            _tensor("finish_reason", choice.finish_reason or ""),
                        ]
                    )
                )
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        """Stop the engine and requests in flight."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._llm.shutdown()
        self._loop.close()


def _read(sampling: str) -> dict[str, object]:
    try:
        settings = json.loads(sampling)
    except ValueError as error:
        raise invalid(f"sampling is not valid JSON: {error}", "sampling") from None
    if not isinstance(settings, dict):
        raise invalid(
            f'sampling is {sampling}; send a JSON object like {{"max_tokens": 64}}.',
            "sampling",
        )
    return settings


def _text(tensor: Any) -> str:
    value = tensor.as_numpy().reshape(-1)[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _tensor(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))


def _end(sender: Any, error: Any) -> None:
    sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
