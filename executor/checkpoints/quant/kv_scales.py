"""Checkpoint scales of fp8 keys and values: one pair for each layer or for each KV head.

Names by writer, after the layer's number:

    compressed-tensors   self_attn.k_scale, self_attn.v_scale; older: k_proj.output_scale, v_proj.output_scale
    ModelOpt             self_attn.k_proj.k_scale, self_attn.v_proj.v_scale
    Quark                self_attn.k_proj.output_scale, self_attn.v_proj.output_scale
    AutoFP8              self_attn.kv_scale, for both
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence

import torch

from quintet.executor.checkpoints.weights.mapped import WeightFile
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
    """Set the scales of layers that have some in the checkpoint; a rank reads those of its own heads.

    by_head: heads may have their own scales. Raises `ConfigError` for an invalid shape or value.
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
    log.info("KV cache is fp8; the checkpoint has scales for %d of %d layers", len(found), len(layers))


def _set(scales: KvScales, which: str | None, values: torch.Tensor) -> None:
    if which != "v":
        scales.key = values
    if which != "k":
        scales.value = values


def _scales_of(file: WeightFile, name: str, layer: AttentionLayer, by_head: bool) -> torch.Tensor:
    """Return the scales of the layer's KV heads on this rank, fp32 ``[num_kv_heads]``."""
    kept = layer.kept_kv_heads or KeptRange(0, layer.num_kv_heads, layer.num_kv_heads)
    shape = file.entries[name].shape
    count = math.prod(shape)
    is_of_heads = by_head and count == kept.whole == max(shape, default=1)
    if count != 1 and not is_of_heads:
        wanted = f"one scale for a layer{f', or for each of its {kept.whole} heads,' if by_head else ''}"
        instead = "int8 (one scale for each token and head) or model" if by_head else "model"
        raise ConfigError(
            f"{file.path}: {name!r:.80} has the shape {list(shape)}; {wanted} is supported: set --kv-cache-dtype {instead}"
        )
    values = file.tensor(name).float().reshape(-1).tolist()
    for value in values:
        if not (math.isfinite(value) and value > 0.0):
            raise ConfigError(
                f"{file.path}: {name!r:.80} is {value:g}, but a scale is a positive number: set --kv-cache-dtype model"
            )
    return torch.tensor(values[kept.begin : kept.end] if count > 1 else values * kept.count)
