"""What a checkpoint says of keys and values in fp8: one scale of a layer's keys, one of its values.

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

from quintet.executor.layers.attention import AttentionLayer, KvScales
from quintet.executor.weights.file import WeightFile
from quintet.wire.errors import ConfigError

log = logging.getLogger(__name__)

_NAME = re.compile(
    r".*\blayers\.(\d+)\.(?:self_attn|attn|attention)\.(?:[kv]_proj\.)?"
    r"(?:(k|v)_scale|(?<=(k|v)_proj\.)output_scale|kv_scale)"
)


def read_kv_scales(files: Sequence[WeightFile], layers: Sequence[AttentionLayer]) -> None:
    """Set the scales of layers that a checkpoint has some of. Raises `ConfigError` for what is no scale of a whole layer."""
    scales = {layer.index: layer.kv_scales for layer in layers}
    found: set[int] = set()
    for file in files:
        for name in file:
            match = _NAME.fullmatch(name)
            if match is not None and int(match[1]) in scales:
                which = match[2] or match[3]
                _set(scales[int(match[1])], which, _value_of(file, name))
                found.add(int(match[1]))
    for layer in layers:
        if layer.values_in_keys:
            layer.kv_scales.value = layer.kv_scales.key
    log.info("keys and values are fp8; the checkpoint has scales of %d of %d layers", len(found), len(layers))


def _set(scales: KvScales, which: str | None, value: float) -> None:
    if which != "v":
        scales.key = value
    if which != "k":
        scales.value = value


def _value_of(file: WeightFile, name: str) -> float:
    shape = file.entries[name].shape
    if math.prod(shape) != 1:
        raise ConfigError(
            f"{file.path}: {name!r:.80} has the shape {list(shape)}; one scale for a layer is read: give --kv-cache-dtype int8,"
            " which has a scale for each token's head, or model"
        )
    value = float(file.tensor(name).float())
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigError(
            f"{file.path}: {name!r:.80} is {value:g}; a scale is a positive number: give --kv-cache-dtype model"
        )
    return value
