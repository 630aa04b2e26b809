"""Compare a GGUF file's metadata with the folder's config: both are parsed as usual, then the specs are compared.

A config with a setting that GGUF cannot express is refused instead of becoming a different model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from quintet.executor.checkpoints.gguf.hf_config import hf_config_of_gguf
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.rope import RopeSpec
from quintet.executor.model_config.shape import SEPARATE_MATRICES
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, MlpSpec, ParallelMixerSpec
from quintet.wire.errors import ConfigError

_CLOSE = 1e-6
"""Files store float32."""


def check_matches(folder: Path, hf_config: dict[str, Any], file: Path) -> None:
    """Raise `ConfigError` with the first setting that differs between the file and the folder's config."""
    theirs = _spec(json.loads(hf_config_of_gguf(read_parts(file))), file)
    ours = _spec(hf_config | {SEPARATE_MATRICES: True}, folder / "config.json")
    for path, wanted, found in _differences(ours, theirs, ""):
        raise ConfigError(
            f"{folder}: GGUF cannot express {path.strip('.')}: the config has {wanted!s:.60}, a file would have {found!s:.60}."
            " Use a compressed-tensors format, which keeps config.json"
        )


def _spec(hf_config: dict[str, object], path: Path) -> object:
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"{path}: unsupported architecture {name!r:.60}")
    spec = FAMILIES[name].read(HfConfig(hf_config, str(path)))
    return _comparable(spec) if isinstance(spec, DecoderSpec) else spec


def _comparable(spec: DecoderSpec) -> DecoderSpec:
    """Remove settings that a file has in another form, and the names of unread tensors.

    Factors of Falcon-H1 are folded into matrices. Curves of Apertus' activations are tensors in a folder. Files may name
    a window of at least the context length, which no layer uses.
    """
    folds = all(
        isinstance(layer.mixer, ParallelMixerSpec) and isinstance(layer.mlp, MlpSpec) for layer in spec.layers
    )
    layers = []
    for layer in spec.layers:
        mixer, mlp = layer.mixer, layer.mlp
        if folds and isinstance(mixer, ParallelMixerSpec):
            state = replace(mixer.state, multipliers=(1.0,) * 5)
            mixer = ParallelMixerSpec(state=state, attention=replace(mixer.attention, scale=1.0))
        elif isinstance(mixer, AttentionSpec) and mixer.window is not None and mixer.window >= spec.reach:
            mixer = replace(mixer, window=None)
        if isinstance(mlp, MlpSpec):
            mlp = replace(mlp, curve=None)
            mlp = replace(mlp, gate_multiplier=1.0, down_multiplier=1.0) if folds else mlp
        layers.append(replace(layer, mixer=mixer, mlp=mlp))
    spec = replace(spec, layers=tuple(layers), names=replace(spec.names, ignored=()))
    return replace(spec, embedding_scale=1.0, logit_scale=1.0) if folds else spec


def _differences(ours: object, theirs: object, path: str) -> Iterator[tuple[str, object, object]]:
    if isinstance(ours, RopeSpec) and isinstance(theirs, RopeSpec):
        ours, theirs = _rotation(ours), _rotation(theirs)
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        for each in dataclasses.fields(ours):
            yield from _differences(
                getattr(ours, each.name), getattr(theirs, each.name), f"{path}.{each.name}"
            )
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{path}[{index}]")
    elif isinstance(ours, float) and isinstance(theirs, float):
        if not math.isclose(ours, theirs, rel_tol=_CLOSE):
            yield path, ours, theirs
    elif ours != theirs:
        yield path, ours, theirs


def _rotation(rope: RopeSpec) -> tuple[object, ...] | RopeSpec:
    """Return the comparable settings: default RoPE has no original context; Llama 3's factors are a tensor."""
    match rope.kind:
        case "default":
            return rope.theta, rope.rotary_dim
        case "llama3" | "factors":
            return "factors", rope.theta, rope.rotary_dim
    return rope
