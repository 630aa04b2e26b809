"""Registry from ``--quantization`` names to quantizations.

`RoundedInputs` wraps a quantization and rounds inputs of integer layers to 8 bits (``--activation-dtype int8``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quintet.executor.backends.platforms.platform import import_string
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.quant.gguf import GgufQuantization
from quintet.executor.checkpoints.quant.method import LinearMethod, LinearShape, Quantization
from quintet.executor.checkpoints.quant.stack import PackedStack, StackMethod, StackShape
from quintet.executor.checkpoints.quant.stored import StoredQuantization
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.checkpoints.weights.plan import WeightPlan
from quintet.wire.errors import ConfigError

QUANTIZATIONS = {
    "none": "quintet.executor.checkpoints.quant.packed:Unquantized",
    "int8": "quintet.executor.checkpoints.quant.packed:int8",
    "int4": "quintet.executor.checkpoints.quant.packed:int4",
    "w8a8": "quintet.executor.checkpoints.quant.packed:w8a8",
}


def open_quantization(
    name: str,
    stored: Format | None = None,
    contents: Mapping[str, Entry] | None = None,
    *,
    on_device: bool = False,
) -> Quantization:
    """Return the quantization of that name, or the checkpoint's if it is ``stored`` in a format.

    contents: checkpoint tensors, None if no checkpoint is read; on_device: device kernels multiply. Raises
    `ConfigError` for an unknown name.
    """
    if stored is not None and stored.name == "gguf":
        if name != "gguf":
            return open_quantization(name)
        return GgufQuantization(contents, open_quantization("none"), on_device)
    if stored is not None:
        rest = name if stored.takes_quantization and name != stored.name else "none"
        return StoredQuantization(stored, open_quantization(rest), contents, rest != "none", on_device)
    if name not in QUANTIZATIONS:
        raise ConfigError(f"--quantization is {name!r}; it must be one of {', '.join(QUANTIZATIONS)}")
    make: Callable[[], Quantization] = import_string(QUANTIZATIONS[name])
    return make()


class RoundedInputs:
    """See `quintet.executor.checkpoints.quant.method.Quantization`. Inputs of the output layer and of exact layers are
    not rounded."""

    def __init__(self, inner: Quantization) -> None:
        """inner: makes the layers."""
        self._inner = inner
        self.num_layers = 0
        """Number of layers with rounded inputs so far."""

    def linear(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod:
        method = self._inner.linear(shape, plan)
        if not shape.is_output_layer and not shape.is_exact:
            rounded = [run.round_inputs() for run in method.runs]
            self.num_layers += any(rounded)
        return method

    def embedding(self, shape: LinearShape, plan: WeightPlan) -> LinearMethod | None:
        return self._inner.embedding(shape, plan)

    def pairs(self, shape: LinearShape, plan: WeightPlan) -> bool:
        return self._inner.pairs(shape, plan)

    def stack(self, shape: StackShape, plan: WeightPlan) -> StackMethod:
        method = self._inner.stack(shape, plan)
        if isinstance(method, PackedStack) and not shape.is_exact:
            self.num_layers += method.round_inputs()
        return method
