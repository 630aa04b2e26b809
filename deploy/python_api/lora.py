"""LoRA adapters of requests, in vLLM's form."""

from __future__ import annotations

import dataclasses

from quintet.deploy.python_api.inputs import ReadPrompt
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.request import adapter_digest


@dataclasses.dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter that the engine has loaded (``lora_modules``). Only its name matters; the other fields are vLLM's."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


def with_adapter(read: ReadPrompt, given: LoRARequest | str | None, model: ModelConfig) -> ReadPrompt:
    """Return the prompt for an adapter, given by its name too. Raises `RequestError` if it is not loaded."""
    if given is None:
        return read
    name = given.lora_name if isinstance(given, LoRARequest) else given
    digest = adapter_digest(model, name)
    if not digest:
        known = ", ".join(f"`{each.name}`" for each in model.adapters) or "none"
        raise RequestError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The adapter `{name}` is not loaded; loaded are: {known}. Pass lora_modules=['{name}=PATH'] to the engine.",
            "lora_request",
        )
    return dataclasses.replace(read, adapter=digest)
