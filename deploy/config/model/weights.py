"""Sizes and tensors of weight files, read from their headers; choice of the weight quantization, and the memory that it uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quintet.deploy.config.flags import Options
from quintet.deploy.config.memory import format_size
from quintet.deploy.config.model.checkpoint_layout import read_entries
from quintet.deploy.config.model.hf_config import ModelFacts
from quintet.executor.checkpoints.quant.formats.registry import check_agrees, check_contents
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.weights.files import PICKLED, checkpoint_files
from quintet.executor.checkpoints.weights.header import Entry
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import hf_config_path, is_gguf


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Sizes of a stored checkpoint."""

    num_parameters: int | None
    """None for pickled files, which have no header."""
    size_bytes: int
    contents: Mapping[str, Entry] = field(default_factory=dict, compare=False, repr=False)
    """Tensor name -> header entry; empty for pickled files."""


def read_weight_facts(folder: Path, predictors: Sequence[str] = ()) -> WeightFacts:
    """Sum the tensor sizes of a folder, or of a GGUF file, from headers.

    predictors: names of multi-token prediction layers, of which a GGUF file's tensors are read instead of the model's.
    Raises `ConfigError` with the name of a missing shard, or of a file with an invalid header.
    """
    if is_gguf(folder):  # imported only here: numpy starts threads, after which the supervisor must not fork
        from quintet.executor.checkpoints.gguf.hf_config import loaded_tensors, predictor_tensors
        from quintet.executor.checkpoints.gguf.parts import read_parts

        parts = read_parts(folder)
        tensors = predictor_tensors(parts, predictors) if predictors else loaded_tensors(parts)
        return facts_of(
            {
                name: Entry(tensor.type.name, tensor.shape, tensor.begin, tensor.num_bytes)
                for name, tensor in tensors
            }
        )
    paths = checkpoint_files(folder)
    if paths[0].suffix in PICKLED:
        return WeightFacts(None, sum(path.stat().st_size for path in paths))
    contents: dict[str, Entry] = {}
    for path in paths:
        contents |= read_entries(path)
    return facts_of(contents)


def facts_of(contents: Mapping[str, Entry]) -> WeightFacts:
    """Return the sizes of tensors by name."""
    num_parameters = sum(math.prod(entry.shape) for entry in contents.values())
    size_bytes = sum(entry.num_bytes for entry in contents.values())
    return WeightFacts(num_parameters, size_bytes, contents)


def read_served_facts(target: ModelFacts) -> WeightFacts:
    """Return the sizes of the tensors that a served model loads: without layers for multi-token prediction, for example.

    Raises `ConfigError` if no tensor is quantized, but the configuration declares quantized weights.
    """
    weights = read_weight_facts(target.path)
    if target.decoder is not None and weights.contents:
        names = target.decoder.names.without_ignored(weights.contents)
        weights = facts_of({name: weights.contents[name] for name in names})
    if target.stored is not None:
        check_contents(target.stored, weights.contents, str(target.path / "config.json"))
    return weights


def num_parameters_of(facts: ModelFacts, weights: WeightFacts | None) -> int | None:
    """Return the number of parameters of unquantized weights, else the one that follows from ``config.json``."""
    counted = weights.num_parameters if weights and facts.stored is None else None
    return facts.spec.num_parameters if counted is None else counted


_WEIGHT_BITS: Mapping[Quantization, float] = {"int8": 8.1, "w8a8": 8.1, "int4": 4.5}
"""Bits per weight, scales included."""


def choose_quantization(options: Options, device: str, facts: ModelFacts) -> Quantization:
    """Return the quantization of linear layers: the checkpoint's format, else the flag's.

    Raises `ConfigError` if the flag contradicts the checkpoint, or for load-time quantization on a GPU.
    """
    requested = options.quantization
    check_agrees(requested, facts.stored, str(hf_config_path(facts.path)))
    if facts.stored is not None and requested in ("none", facts.stored.name):
        return facts.stored.name
    if device != "cpu" and requested != "none":
        raise ConfigError(
            f"--quantization {options.quantization} is supported on CPUs only: add --device cpu or drop it"
        )
    return requested


def loaded_quantization(name: str) -> Quantization:
    """Return the quantization of this name if it converts unquantized weights at load, else ``none``."""
    return next((each for each in _WEIGHT_BITS if each == name), "none")


def check_activations(options: Options, quantization: Quantization) -> None:
    """Reject ``--activation-dtype`` without integer weights."""
    if options.activation_dtype != "auto" and quantization == "none":
        raise ConfigError(
            f"--activation-dtype {options.activation_dtype} requires integer weights, but this model is not quantized: add"
            " --quantization int8 or int4, use a quantized checkpoint, or drop it"
        )


def weight_bytes_of(
    num_parameters: int,
    dtype_bytes: int,
    quantization: Quantization,
    stored: Format | None,
    weights: WeightFacts | None,
    num_copied: int,
) -> int:
    """Return the memory of a checkpoint's weights in bytes, as if all were linear layers.

    num_copied: additional parameters of redundant experts.
    """
    if stored is not None and weights is not None and quantization == stored.name:
        once = stored.memory_bytes(weights.contents, dtype_bytes)
        return once + once * num_copied // max(1, num_parameters)
    bits = _WEIGHT_BITS.get(quantization, 8 * dtype_bytes)
    return int((num_parameters + num_copied) * bits / 8)


def check_weights_fit(weight_bytes: int, available_bytes: int, num_engines: int, num_ranks: int) -> None:
    """Reject a model with weights larger than the available memory. Both sizes are per rank of an engine."""
    if weight_bytes > available_bytes:
        shares = [f"{num_ranks} ranks"] * (num_ranks > 1) + [f"{num_engines} engines"] * (num_engines > 1)
        each = f" for each of {' of each of '.join(shares)}" if shares else ""
        raise ConfigError(
            f"the weights need {format_size(weight_bytes)}, but {format_size(available_bytes)} of memory is available{each}: use"
            " a smaller model, or --quantization int8 or int4"
        )
