"""Pooling of the served model: ``--runner``, ``--pooler-config``, and the files of sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import ModelFacts
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import parse_json, read_json, read_text
from quintet.wire.params import shown
from quintet.wire.pooling import PoolingConfig, PoolingType

FLAG = "--pooler-config"
KINDS = {kind.name: kind for kind in PoolingType}
TYPE_KEYS = ("pooling_type", "seq_pooling_type")
"""Names of the key of vLLM."""
NORMALIZE_KEYS = ("use_activation", "normalize")
OLD_MODES = {"lasttoken": "LAST", "mean_tokens": "MEAN"}
"""``pooling_mode_…`` of older versions of sentence-transformers -> name of a `PoolingType`."""


def pooling_config(options: Options, facts: ModelFacts, notes: list[str]) -> PoolingConfig | None:
    """Return the section; None if the server does not pool. Appends to ``notes``. Raises `ConfigError`."""
    given = _given(options)
    stored, reason = _of_folder(facts.path)
    is_asked = options.runner == "pooling" or bool(options.pooler_config)
    if options.runner == "generate" and options.pooler_config:
        raise ConfigError(f"{FLAG} needs --runner pooling or auto, but it is generate: drop one of them")
    if options.runner == "generate" or not (is_asked or stored or reason):
        return None
    if is_asked and reason and "kind" not in given:
        raise ConfigError(f'{facts.path}: {reason}: choose {FLAG} \'{{"pooling_type": "LAST"}}\' or "MEAN"')
    obstacle = _obstacle(options, facts)
    if is_asked and obstacle:
        raise ConfigError(f"--runner pooling: {obstacle}")
    if not is_asked and (reason or obstacle):
        notes.append(f"no endpoints of embeddings: {reason or obstacle}")
        return None
    values: dict[str, Any] = {"kind": PoolingType.LAST, **stored, **given}
    notes.append(
        f"embeddings: {values['kind'].name}{'' if values.get('normalize', True) else ', not normalized'}"
    )
    assert facts.decoder is not None, "otherwise an obstacle"
    return PoolingConfig(width=facts.decoder.hidden_size, **values)


def _given(options: Options) -> dict[str, Any]:
    """Return the values of ``--pooler-config``."""
    values: dict[str, Any] = {}
    for key, value in options.pooler_config.items():
        if value is None:
            continue
        if key in TYPE_KEYS and str(value).upper() in KINDS:
            values["kind"] = KINDS[str(value).upper()]
        elif key in TYPE_KEYS:
            raise ConfigError(f"{FLAG}: {key} is {shown(value)}; it must be one of {', '.join(KINDS)}")
        elif key in NORMALIZE_KEYS and isinstance(value, bool):
            values["normalize"] = value
        elif key in NORMALIZE_KEYS:
            raise ConfigError(f"{FLAG}: {key} is {shown(value)}; it must be true or false")
        else:
            raise ConfigError(
                f"{FLAG}: the key {shown(key)} is not supported; allowed are {', '.join((*TYPE_KEYS, *NORMALIZE_KEYS))}"
            )
    return values


def _obstacle(options: Options, facts: ModelFacts) -> str:
    """Return the reason for which the server cannot pool; "" if there is none."""
    if facts.decoder is None:
        return f"{facts.architecture} is not one of Quintet's decoders: drop --model-impl transformers or --runner pooling"
    if options.pipeline_parallel_size > 1:
        return "pooling is not supported with --pipeline-parallel-size: drop one of them"
    return ""


def _of_folder(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the values of a folder of sentence-transformers, and the reason for which they are not supported."""
    path = folder / "modules.json"
    if not path.is_file():
        return {}, ""
    modules = parse_json(f'{{"modules": {read_text(path)}}}', path)["modules"]
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{path} must hold a list of objects; download it again")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        return {}, f"its modules {', '.join(unknown)} of sentence-transformers are not supported"
    if "Pooling" not in kinds:
        return {}, "modules.json has no module Pooling"
    pooling = read_json(folder / str(modules[kinds.index("Pooling")].get("path", "")) / "config.json")
    mode = pooling.get("pooling_mode")
    if mode is None:
        modes = [
            key.removeprefix("pooling_mode_")
            for key, value in pooling.items()
            if value is True and "mode_" in key
        ]
        mode = "+".join(sorted(modes))
    name = OLD_MODES.get(str(mode), str(mode).upper())
    if name not in KINDS:
        return {}, f"its pooling mode {shown(mode)} of sentence-transformers is not supported"
    return {"kind": KINDS[name], "normalize": "Normalize" in kinds}, ""
