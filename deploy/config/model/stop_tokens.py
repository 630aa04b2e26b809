"""End-of-sequence token ids, collected from all files of a model.

Fine-tunes often add an end-of-turn token that only the tokenizer or the chat template names, while the configuration
has the base model's. Without it, generation would continue with the user's next turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from quintet.deploy.config.model.chat_templates import DEFAULT
from quintet.tokenizer_proc.template_environment import make_environment
from quintet.tokenizer_proc.template_files import special_tokens
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import Json, read_json

_ANSWER = "quintet"
"""Marker text that no template contains."""
_CONTENTS: tuple[object, ...] = (_ANSWER, [{"type": "text", "text": _ANSWER}])
"""Forms of message content: templates of multimodal models accept only lists of parts."""


class _Token(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []


def configured_ids(*configs: object) -> list[int]:
    """Return the ``eos_token_id`` values of configurations, in order, without duplicates.

    Skips configurations that are not JSON objects, and values that are not ids. ``2.0`` and ``"2"`` are ids.
    """
    found: list[int] = []
    for config in configs:
        ids = config.get("eos_token_id") if isinstance(config, dict) else None
        listed: list[object] = ids if isinstance(ids, list) else [ids]
        found += [token_id for token_id in map(_token_id, listed) if token_id is not None]
    return list(dict.fromkeys(found))


def _token_id(value: object) -> int | None:
    """Return a value of ``eos_token_id`` as an id; None if it is not one."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def end_token_ids(configured: Iterable[int], folder: Path, templates: Mapping[str, str]) -> list[int]:
    """Return the configured ids, the tokenizer's ``eos_token``, and the end-of-turn token of its chat template.

    folder: the tokenizer's. Raises `ConfigError` for invalid JSON files.
    """
    tokens = _added_tokens(folder)
    sources = [_read(folder / name) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    special = special_tokens(sources)
    named = [special.get("eos_token"), _end_of_turn(templates, special, tokens)]
    found = [tokens[name] for name in named if name is not None and name in tokens]
    return list(dict.fromkeys([*configured, *found]))


def _end_of_turn(
    templates: Mapping[str, str], special: Mapping[str, str], tokens: Mapping[str, int]
) -> str | None:
    """Return the token that the chat template writes after the last assistant message, or None.

    Only the last message counts: in gpt-oss, earlier messages end with another token.
    """
    source = templates.get(DEFAULT) or next(iter(templates.values()), "")
    if "{" not in source:
        return None
    for content in _CONTENTS:
        _, answer, rest = _rendered(source, content, special).rpartition(_ANSWER)
        if answer:
            written = [name for name in tokens if name and rest.lstrip().startswith(name)]
            return max(written, key=len, default=None)
    return None


def _rendered(source: str, content: object, special: Mapping[str, str]) -> str:
    """Render a conversation; return an empty text if the template raises."""
    messages = [{"role": role, "content": content} for role in ("user", "assistant")]
    try:
        template = make_environment().from_string(source)
        return template.render(
            special, messages=messages, add_generation_prompt=False, tools=None, documents=None
        )
    except Exception:  # noqa: BLE001 - templates are foreign code and may raise any exception
        return ""


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return added tokens: text -> id."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        described = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a valid tokenizer: {error}; download it again") from None
    return {token.content: token.id for token in described.added_tokens}


def _read(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}
