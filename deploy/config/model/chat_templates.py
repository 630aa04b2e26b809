"""Chat templates of a model, by name, from the files that transformers reads. The tokenizer process renders them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeGuard

from quintet.wire.errors import ConfigError
from quintet.wire.model_files import read_json

DEFAULT = "default"
_HALF = re.compile("[\ud800-\udfff]")


def read_chat_templates(folder: Path, flag: str | None) -> dict[str, str]:
    """Return the template given by the flag (file path or text) as the only one, else the folder's templates by name.

    Precedence: ``chat_template.jinja`` (the default) with ``additional_chat_templates/<name>.jinja``, then
    ``chat_template.json``, ``processor_config.json``, ``tokenizer_config.json``. The JSON files contain one template, a list
    or a map.
    Raises `ConfigError` with the file.
    """
    if flag is not None:
        return {DEFAULT: _given(flag)}
    templates = _in_files(folder)
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        if not templates and (folder / name).is_file():
            templates = _in_json(read_json(folder / name).get("chat_template"), folder / name)
    return templates


def _given(flag: str) -> str:
    if "{" in flag or "\n" in flag:
        return flag
    path = Path(flag).expanduser()
    if not path.is_file():
        raise ConfigError(f"--chat-template {flag!r} is neither a file nor a Jinja template")
    return _text(path)


def _in_files(folder: Path) -> dict[str, str]:
    paths = {DEFAULT: folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return {name: text for name, path in paths.items() if path.is_file() and (text := _text(path))}


def _in_json(value: object, path: Path) -> dict[str, str]:
    match value:
        case None | "":
            return {}
        case str() if _is_text(value):
            return {DEFAULT: value}
        case list():
            named = [(entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)]
            is_whole = len(named) == len(value)
        case dict():
            named, is_whole = list(value.items()), True
        case _:
            named, is_whole = [], False
    templates = {name: template for name, template in named if _is_text(name) and _is_text(template)}
    if not is_whole or len(templates) != len(named):
        raise ConfigError(
            f"{path}: chat_template must be a template, a list of named templates "
            '([{"name": …, "template": …}, …]), or a map from names to templates; fix the file, or set --chat-template'
        )
    return templates


def _is_text(value: object) -> TypeGuard[str]:
    """Return whether it is a string without lone surrogates, which JSON escapes may create."""
    return isinstance(value, str) and _HALF.search(value) is None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
