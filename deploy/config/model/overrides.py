"""Merge overrides into a config, with RoPE settings under their newer and older keys."""

from __future__ import annotations

from quintet.executor.model_config.shape import FULL
from quintet.wire.model_files import Json

_ROPES = ("rope_parameters", "rope_scaling")
"""Keys of RoPE settings: of transformers 5, and of older versions."""


def with_one_rope(config: Json) -> Json:
    """Return a config with ``rope_scaling`` merged into ``rope_parameters``, of the language model too if it is a part.

    Some have both, because ``rope_scaling`` was added by hand to extend the context. It wins, as in transformers.
    """
    part = config.get("text_config")
    return _with_one_rope(
        config | {"text_config": _with_one_rope(part)} if isinstance(part, dict) else config
    )


def _with_one_rope(config: Json) -> Json:
    if not all(isinstance(config.get(key), dict) and config[key] for key in _ROPES):
        return config
    return overridden(config | {"rope_scaling": None}, {"rope_scaling": config["rope_scaling"]})


def overridden(config: Json, changes: Json) -> Json:
    """Return a config with overrides merged in. Older RoPE keys override ``rope_parameters`` if present."""
    changed = dict(config)
    for key, value in changes.items():
        current, rope = changed.get(key), changed.get("rope_parameters")
        if key == "rope_scaling" and isinstance(rope, dict) and isinstance(value, dict):
            changed["rope_parameters"] = _with_rope_settings(rope, value)
        elif key == "rope_theta" and isinstance(rope, dict):
            changed["rope_parameters"] = _with_rope_settings(rope, {key: value})
        elif isinstance(current, dict) and isinstance(value, dict):
            merge = _with_rope_settings if key in _ROPES else overridden
            changed[key] = merge(current, value)
        else:
            changed[key] = value
    return changed


def _with_rope_settings(rope: Json, settings: Json) -> Json:
    """Return RoPE settings with others merged in: into those of full attention if there are some for each layer type."""
    full = rope.get(FULL)
    if isinstance(full, dict) and not any(isinstance(each, dict) for each in settings.values()):
        return rope | {FULL: _with_rope_settings(full, settings)}
    kind = {"rope_type": settings["type"]} if "type" in settings else {}
    return overridden(rope, kind | settings)
