"""Normalization of URL paths: slashes, and Azure's prefix of OpenAI's API."""

from __future__ import annotations

import re

_ALIAS, _ALIASED = "/openai", "/openai/v1/"
"""Azure's path prefix, and the paths on which it is removed."""
_MODEL_NAME = re.compile(r"(.*?/v[12]/+models/)(/*[^/].*)")
"""Paths that end with a model name, which may be a folder's path."""


def tidy_path(path: str) -> str:
    """Merge slashes of a path and strip the final one: client base URLs often end with a slash."""
    if "//" not in path and not path.endswith("/"):
        return path
    match = _MODEL_NAME.fullmatch(path)
    head, name = match.groups() if match is not None else (path, "")
    head = re.sub("/{2,}", "/", head)
    return head + name.rstrip("/") if name else head.rstrip("/") or "/"


def without_alias(path: str) -> str:
    """Strip Azure's prefix from a path of OpenAI's API."""
    return path.removeprefix(_ALIAS) if path.startswith(_ALIASED) else path
