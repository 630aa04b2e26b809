"""Quantization name, as in ``--quantization``, to what makes a model's linear layers."""

from __future__ import annotations

from collections.abc import Callable

from quintet.executor.platforms.platform import import_string
from quintet.executor.quant.method import Quantization
from quintet.wire.errors import ConfigError

QUANTIZATIONS = {
    "none": "quintet.executor.quant.none:Unquantized",
    "int8": "quintet.executor.quant.packed:int8",
    "int4": "quintet.executor.quant.packed:int4",
    "w8a8": "quintet.executor.quant.packed:w8a8",
}


def open_quantization(name: str) -> Quantization:
    """Return the quantization of that name. Raises `ConfigError` for one that does not exist."""
    if name not in QUANTIZATIONS:
        raise ConfigError(f"--quantization is {name!r}; it must be one of {', '.join(QUANTIZATIONS)}")
    make: Callable[[], Quantization] = import_string(QUANTIZATIONS[name])
    return make()
