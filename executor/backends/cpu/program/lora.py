"""LoRA adapters of a linear layer in a recorded program."""

from __future__ import annotations

import ctypes

from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.values import Extent, Value
from quintet.executor.lora.adapters import LoraLayer


def append_lora(
    library: ProgramLibrary,
    handle: int,
    lora: LoraLayer,
    x: Value,
    y: Value,
    max_tokens: int,
    code: int,
    activation: int,
) -> None:
    """Append the adapters of a layer with input ``x`` and result ``y``, then its activation. code: of their dtype."""
    assert x.extent is Extent.TOKENS, "only layers over all tokens have adapters"
    a, b = lora.handles
    library.lora(
        *(handle, ctypes.addressof(a), ctypes.addressof(b), len(b), x.address, x.stride, max_tokens),
        *(code, y.address, y.stride),
    )
    if activation:
        place = (y.address, y.stride)
        library.activation(handle, activation, *place, y.width, *place, code, y.extent)
