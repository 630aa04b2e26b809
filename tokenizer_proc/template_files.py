"""Loading of a model's chat templates and special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quintet.tokenizer_proc.chat_template import ChatTemplates
from quintet.wire.config import ModelConfig
from quintet.wire.errors import ConfigError

SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


def load_templates(model: ModelConfig) -> ChatTemplates:
    """Compile the configured templates, with the special tokens of the tokenizer's folder.

    Raises `ConfigError` for an unreadable file or invalid Jinja.
    """
    folder = Path(model.tokenizer_path)
    config = _read_object(folder / "tokenizer_config.json")
    special = special_tokens([_read_object(folder / "special_tokens_map.json"), config])
    loaded = ChatTemplates(model.chat_templates, special, model.chat_template_content_format)
    loaded.compile()
    return loaded


def special_tokens(sources: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the special tokens available to templates. Later sources override earlier ones."""
    found: dict[str, str] = {}
    for source in sources:
        for name in SPECIAL_TOKEN_NAMES:
            token = source.get(name)
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                found[name] = token
    return found


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error
