"""Quintet: a serving engine for large language models, built as five kinds of process.

The public Python API. The names load on first use, because every child process imports this package for its folder
and must not pay for the others.
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
        LLMEngine,
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
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "quintet.deploy.python_api.offline",
    "AsyncLLM": "quintet.deploy.python_api.offline",
    "BeamSearchOutput": "quintet.deploy.python_api.offline",
    "BeamSearchParams": "quintet.deploy.python_api.offline",
    "CompletionOutput": "quintet.deploy.python_api.offline",
    "LLMEngine": "quintet.deploy.python_api.offline",
    "RequestOutput": "quintet.deploy.python_api.offline",
    "SamplingParams": "quintet.wire.params",
    "StructuredOutputsParams": "quintet.wire.structured",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quintet' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
