"""Which tokens end an answer: those that any of a model's files names.

Fine-tunes add a second one and forget to say so everywhere: the configuration has the base model's, the tokenizer or the chat
template the one that the model learned. A model that draws it and is not stopped goes on with the client's next turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from quintet.deploy.config.chat_templates import DEFAULT
from quintet.tokenizer_proc.chat_template import make_environment, special_tokens
from quintet.wire.errors import ConfigError
from quintet.wire.json_files import Json, read_json

_ANSWER = "quintet"
"""Text that no template writes."""
_CONTENTS: tuple[object, ...] = (_ANSWER, [{"type": "text", "text": _ANSWER}])
"""How an answer's content may look: templates of models that see take lists of parts alone."""


class _Token(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []


def configured_ids(*configs: Json) -> list[int]:
    """Return the ids that configurations name, the first one's first; an empty list when none does."""
    found: list[int] = []
    for config in configs:
        ids = config.get("eos_token_id")
        listed: list[object] = ids if isinstance(ids, list) else [ids]
        whole = [
            token_id for token_id in listed if isinstance(token_id, int) and not isinstance(token_id, bool)
        ]
        found += whole if len(whole) == len(listed) else []
    return list(dict.fromkeys(found))


def end_token_ids(configured: Iterable[int], folder: Path, templates: Mapping[str, str]) -> list[int]:
    """Return what the configurations name, the tokenizer's end of sequence, and what ends a turn in its chat template.

    folder: the tokenizer's. Raises `ConfigError` for files that are no JSON.
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
    """Return the token that the chat template writes behind a conversation's last answer; None where it writes none.

    Behind the last one alone: gpt-oss's messages end with another token than its answers.
    """
    source = templates.get(DEFAULT) or next(iter(templates.values()), "")
    if "{" not in source:
        return None
    for content in _CONTENTS:
        _, answer, behind = _rendered(source, content, special).rpartition(_ANSWER)
        if answer:
            written = [name for name in tokens if name and behind.lstrip().startswith(name)]
            return max(written, key=len, default=None)
    return None


def _rendered(source: str, content: object, special: Mapping[str, str]) -> str:
    """Return a conversation's text; nothing where the template refuses it."""
    messages = [{"role": role, "content": content} for role in ("user", "assistant")]
    try:
        template = make_environment().from_string(source)
        return template.render(
            special, messages=messages, add_generation_prompt=False, tools=None, documents=None
        )
    except Exception:  # noqa: BLE001 - a template is foreign code, and may raise anything
        return ""


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the tokens that stand beside the vocabulary, by their text."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        described = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}; download it again") from None
    return {token.content: token.id for token in described.added_tokens}


def _read(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}
