"""End-of-sequence token ids, collected from all files of a model.

Fine-tunes often add an end-of-turn token that only the tokenizer or the chat template names, while the configuration
has the base model's. Without it, generation would continue with the user's next turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from quintet.deploy.config.model.chat_templates import DEFAULT
from quintet.deploy.config.model.tokenizer_json import MAX_DIGITS, declared_tokens, vocabulary
from quintet.tokenizer_proc.template_environment import make_environment
from quintet.tokenizer_proc.template_files import named_tokens, special_tokens
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import LFS_ADVICE, LFS_POINTER, Json, read_json

_ANSWER = "quintet"
"""Marker text that no template contains."""
_CONTENTS: tuple[object, ...] = (_ANSWER, [{"type": "text", "text": _ANSWER}])
"""Forms of message content: templates of multimodal models accept only lists of parts."""
_ROLES = (("user", "assistant"), ("system", "user", "assistant"))
"""Roles of conversations: some templates require a system message."""


class _Token(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


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
    if isinstance(value, str) and value.isdecimal() and len(value) <= MAX_DIGITS:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def end_token_ids(configured: Iterable[int], folder: Path, templates: Mapping[str, str]) -> list[int]:
    """Return the configured ids, the tokenizer's ``eos_token`` in each file, and the end-of-turn token of its chat template.

    folder: the tokenizer's. Raises `ConfigError` for invalid JSON files.
    """
    older, config = (_read(folder / name) for name in ("special_tokens_map.json", "tokenizer_config.json"))
    special = special_tokens(older, config)
    tokenizer = _read_tokenizer(folder)
    declared = {str(token["content"]): token_id for token_id, token in declared_tokens(config).items()}
    tokens = declared | {token.content: token.id for token in tokenizer.added_tokens}
    named = [named_tokens(source).get("eos_token") for source in (config, older)]
    named.append(_end_of_turn(templates, special, tokens))
    wanted = [name for name in named if name is not None]
    if not tokens.keys() >= set(wanted):
        tokens = _ordinary_tokens(tokenizer, folder) | tokens
    found = [tokens[name] for name in wanted if name in tokens]
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
    for roles, content in itertools.product(_ROLES, _CONTENTS):
        _, answer, rest = _rendered(source, roles, content, special).rpartition(_ANSWER)
        if answer:
            written = [name for name in tokens if name and rest.lstrip().startswith(name)]
            return max(written, key=len, default=None)
    return None


def _rendered(source: str, roles: Sequence[str], content: object, special: Mapping[str, str]) -> str:
    """Render a conversation; return an empty text if the template raises."""
    messages = [{"role": role, "content": content} for role in roles]
    try:
        template = make_environment().from_string(source)
        return template.render(
            special, messages=messages, add_generation_prompt=False, tools=None, documents=None
        )
    except Exception:  # noqa: BLE001 - templates are foreign code and may raise any exception
        return ""


def _read_tokenizer(folder: Path) -> _Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _Tokenizer()
    text = path.read_bytes()
    try:
        return msgspec.json.decode(text, type=_Tokenizer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = LFS_ADVICE if text.startswith(LFS_POINTER) else f"{error}; download it again"
        raise ConfigError(f"{path} is not a valid tokenizer: {reason}") from None


def _ordinary_tokens(tokenizer: _Tokenizer, folder: Path) -> dict[str, int]:
    """Return the tokens of the tokenizer's model: text -> id."""
    try:
        return vocabulary(tokenizer.model)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{folder / 'tokenizer.json'}: model is invalid: {error}; download it again"
        ) from None


def _read(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}
