"""Loading of a model's chat templates and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.wire.config import ModelConfig
from quintet.wire.model_files import read_json


def load_templates(model: ModelConfig) -> ChatTemplates:
    """Compile the configured templates, with the special tokens of the tokenizer's folder.

    Raises `ConfigError` for an unreadable file or invalid Jinja.
    """
    folder = Path(model.tokenizer_path)
    config = _read_object(folder / "tokenizer_config.json")
    special = special_tokens(_read_object(folder / "special_tokens_map.json"), config)
    loaded = ChatTemplates(model.chat_templates, special, model.chat_template_content_format)
    loaded.compile()
    return loaded


def special_tokens(older: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens available to templates: of ``special_tokens_map.json`` and ``tokenizer_config.json``.

    As in transformers, the older file has priority unless ``tokenizer_config.json`` declares the added tokens.
    """
    tokens, older_tokens = named_tokens(config), named_tokens(older)
    return older_tokens | tokens if "added_tokens_decoder" in config else tokens | older_tokens


def named_tokens(source: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of one file: name, such as ``bos_token`` or ``image_token`` -> text."""
    extra = source.get("extra_special_tokens")
    found = {}
    for name, value in {**source, **(extra if isinstance(extra, dict) else {})}.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def _read_object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
