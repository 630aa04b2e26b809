"""What linear layers become: by the checkpoint and the flag, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Mapping

from quintet.deploy.config.card import ModelFacts
from quintet.deploy.config.flags import Options
from quintet.deploy.config.memory import format_size
from quintet.deploy.config.weights import WeightFacts
from quintet.executor.checkpoints.quant.formats.registry import check_agrees
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import card_path

_WEIGHT_BITS: Mapping[Quantization, float] = {"int8": 8.1, "w8a8": 8.1, "int4": 4.5}
"""With their scales."""


def choose_quantization(options: Options, device: str, facts: ModelFacts) -> Quantization:
    """Return what linear layers become: as the checkpoint has them, if it is quantized, else as the flag says.

    Rejects what contradicts the checkpoint, and what only the host kernels can do where they do not compute.
    """
    asked = options.quantization
    check_agrees(asked, facts.stored, str(card_path(facts.path)))
    if facts.stored is not None and asked in ("none", facts.stored.name):
        return facts.stored.name
    if device != "cpu" and asked != "none":
        raise ConfigError(
            f"--quantization {options.quantization} is computed on the CPU only: add --device cpu or drop it"
        )
    return asked


def check_activations(options: Options, device: str, quantization: Quantization) -> None:
    """Reject rounded inputs where nothing multiplies integers."""
    if options.activation_dtype == "auto":
        return
    if device != "cpu":
        raise ConfigError(
            f"--activation-dtype {options.activation_dtype} is computed on the CPU only: add --device cpu or drop it"
        )
    if quantization == "none":
        raise ConfigError(
            f"--activation-dtype {options.activation_dtype} is for weights that are integers, and this model's are not: add"
            " --quantization int8 or int4, take a quantized checkpoint, or drop it"
        )


def check_packed_cache(options: Options, device: str) -> None:
    """Reject a cache of what only the host kernels read where they do not compute."""
    if device != "cpu" and options.packed_cache is not None:
        raise ConfigError("--packed-cache is for weights packed for the CPU: add --device cpu or drop it")


def weight_bytes_of(
    num_parameters: int,
    dtype_bytes: int,
    quantization: Quantization,
    stored: Format | None,
    weights: WeightFacts | None,
    num_copied: int,
) -> int:
    """Return the memory that the weights of a checkpoint will take, as if all were linear layers.

    num_copied: parameters there is room for besides.
    """
    if stored is not None and weights is not None and quantization == stored.name:
        once = stored.memory_bytes(weights.contents, dtype_bytes)
        return once + once * num_copied // max(1, num_parameters)
    bits = _WEIGHT_BITS.get(quantization, 8 * dtype_bytes)
    return int((num_parameters + num_copied) * bits / 8)


def check_weights_fit(weight_bytes: int, available_bytes: int, num_engines: int, num_ranks: int) -> None:
    """Reject a model whose weights are larger than the memory there is. Bytes: of each rank of each engine."""
    if weight_bytes > available_bytes:
        shares = [f"{num_ranks} ranks"] * (num_ranks > 1) + [f"{num_engines} engines"] * (num_engines > 1)
        each = f" for each of {' of each of '.join(shares)}" if shares else ""
        raise ConfigError(
            f"the weights take {format_size(weight_bytes)} and there are {format_size(available_bytes)} of memory{each}: take a"
            " smaller model, or --quantization int8 or int4"
        )
