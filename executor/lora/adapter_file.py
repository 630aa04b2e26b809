"""Files of an adapter, in the format of PEFT: low-rank matrices by module name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quintet.executor.checkpoints.weights.mapped import MappedFile
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterConfig,
    Json,
    adapter_digest_of,
    read_json,
)

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_NUMBERS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class LowRank:
    """Matrices of one module: it adds ``x @ a.T @ b.T`` to its result."""

    a: torch.Tensor
    """``[rank, inputs]``"""
    b: torch.Tensor
    """fp32 ``[outputs, rank]``, times the adapter's scale"""


def read_adapter(adapter: AdapterConfig) -> dict[str, LowRank]:
    """Return the matrices of each module, by its name in the model. Raises `ConfigError`, also if the files have changed.

    A restarted executor must have the weights of the lost one: requests continue, and KV back ends hold keys and values.
    """
    folder = Path(adapter.path)
    if adapter_digest_of(folder) != adapter.digest:
        raise ConfigError(
            f"LoRA adapter {adapter.name!r}: the files in {folder} have changed since the server started; put the former ones"
            " back, or restart the server"
        )
    hf_config, file = read_json(folder / ADAPTER_CONFIG), MappedFile(folder / ADAPTER_WEIGHTS)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in file.entries.items():
        found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None or len(entry.shape) != 2 or entry.dtype not in _NUMBERS:
            raise ConfigError(
                f"{file.path}: tensor {name!r:.120} {list(entry.shape)!s:.80} ({entry.dtype}) is not supported; supported are"
                f" matrices lora_A.weight and lora_B.weight of linear layers in {', '.join(_NUMBERS)}"
            )
        pairs.setdefault(found[1], {})[found[2]] = file.tensor(name)
    if not pairs:
        raise ConfigError(f"{file.path} has no matrices lora_A.weight and lora_B.weight")
    modules: dict[str, LowRank] = {}
    for module, pair in pairs.items():
        if len(pair) < 2 or not pair["A"].shape[0] == pair["B"].shape[1] > 0:
            shapes = ", ".join(f"lora_{half} {list(each.shape)}" for half, each in sorted(pair.items()))
            raise ConfigError(
                f"{file.path}: module {module!r:.120} has {shapes}; expected lora_A [rank, inputs] and lora_B [outputs, rank]"
            )
        scale = _scale(hf_config, module, pair["A"].shape[0])
        modules[module] = LowRank(pair["A"], pair["B"].float() * scale)
    return modules


def _scale(hf_config: Json, module: str, rank: int) -> float:
    """Return ``alpha / rank`` of a module, or ``alpha / sqrt(rank)`` (Kalajdzievski, "rsLoRA", 2023)."""
    values: dict[str, Any] = dict(hf_config)
    patterns: dict[str, Any] = values.get("alpha_pattern") or {}
    matches = (each for each in patterns if re.fullmatch(rf"(?:.*\.)?(?:{each})", module))
    first = next(matches, None)
    alpha = values.get("lora_alpha", 8) if first is None else patterns[first]
    return float(alpha) / (math.sqrt(rank) if values.get("use_rslora") else rank)
