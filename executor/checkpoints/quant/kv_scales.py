"""What a checkpoint says of keys and values in fp8: a scale of a layer's keys and one of its values, or of each KV head's.

Names that writers give them, all behind the layer's number:

    compressed-tensors   self_attn.k_scale, self_attn.v_scale; of old k_proj.output_scale, v_proj.output_scale
    ModelOpt             self_attn.k_proj.k_scale, self_attn.v_proj.v_scale
    Quark                self_attn.k_proj.output_scale, self_attn.v_proj.output_scale
    AutoFP8              self_attn.kv_scale, of both
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence

import torch

from quintet.executor.checkpoints.weights.file import WeightFile
from quintet.executor.model_config.share import KeptRange
from quintet.executor.models.layers.attention import AttentionLayer, KvScales
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

_NAME = re.compile(
    r".*\blayers\.(\d+)\.(?:self_attn|attn|attention)\.(?:[kv]_proj\.)?"
    r"(?:(k|v)_scale|(?<=(k|v)_proj\.)output_scale|kv_scale)"
)


def read_kv_scales(
    files: Sequence[WeightFile], layers: Sequence[AttentionLayer], *, by_head: bool = True
) -> None:
    """Set the scales of layers that a checkpoint has some of: of a rank those of its own heads.

    by_head: whether heads may have scales of their own. Raises `ConfigError` for what are no scales of a layer or its heads.
    """
    by_index = {layer.index: layer for layer in layers}
    found: set[int] = set()
    for file in files:
        for name in file:
            match = _NAME.fullmatch(name)
            if match is not None and (layer := by_index.get(int(match[1]))) is not None:
                _set(layer.kv_scales, match[2] or match[3], _scales_of(file, name, layer, by_head))
                found.add(layer.index)
    for layer in layers:
        if layer.values_in_keys:
            layer.kv_scales.value = layer.kv_scales.key
    log.info("keys and values are fp8; the checkpoint has scales of %d of %d layers", len(found), len(layers))


def _set(scales: KvScales, which: str | None, values: torch.Tensor) -> None:
    if which != "v":
        scales.key = values
    if which != "k":
        scales.value = values


def _scales_of(file: WeightFile, name: str, layer: AttentionLayer, by_head: bool) -> torch.Tensor:
    """Return fp32 ``[num_kv_heads]`` of those that the layer has here."""
    kept = layer.kept_kv_heads or KeptRange(0, layer.num_kv_heads, layer.num_kv_heads)
    shape = file.entries[name].shape
    count = math.prod(shape)
    is_of_heads = by_head and count == kept.whole == max(shape, default=1)
    if count != 1 and not is_of_heads:
        wanted = f"one scale for a layer{f', or for each of its {kept.whole} heads,' if by_head else ''}"
        instead = "int8, which has a scale for each token's head, or model" if by_head else "model"
        raise ConfigError(
            f"{file.path}: {name!r:.80} has the shape {list(shape)}; {wanted} is read: give --kv-cache-dtype {instead}"
        )
    values = file.tensor(name).float().reshape(-1).tolist()
    for value in values:
        if not (math.isfinite(value) and value > 0.0):
            raise ConfigError(
                f"{file.path}: {name!r:.80} is {value:g}; a scale is a positive number: give --kv-cache-dtype model"
            )
    return torch.tensor(values[kept.begin : kept.end] if count > 1 else values * kept.count)
