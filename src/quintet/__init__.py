"""Quintet: a serving engine for large language models with five kinds of process.

Public Python API. Names are imported on first use, because every child process imports this package and needs only its own
folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quintet.deploy.python_api.offline import (
        LLM,
        AsyncLLM,
        BeamSearchOutput,
        BeamSearchParams,
        CompletionOutput,
        EmbeddingRequestOutput,
        LLMEngine,
        LoRARequest,
        RequestOutput,
    )
    from quintet.wire.params import SamplingParams
    from quintet.wire.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LLMEngine",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_MODULES = {
    "LLM": "quintet.deploy.python_api.offline",
    "AsyncLLM": "quintet.deploy.python_api.offline",
    "BeamSearchOutput": "quintet.deploy.python_api.offline",
    "BeamSearchParams": "quintet.deploy.python_api.offline",
    "CompletionOutput": "quintet.deploy.python_api.offline",
    "EmbeddingRequestOutput": "quintet.deploy.python_api.offline",
    "LLMEngine": "quintet.deploy.python_api.offline",
    "LoRARequest": "quintet.deploy.python_api.offline",
    "RequestOutput": "quintet.deploy.python_api.offline",
    "SamplingParams": "quintet.wire.params",
    "StructuredOutputsParams": "quintet.wire.structured",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'quintet' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
