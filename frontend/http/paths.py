"""Normalization of URL paths: slashes, Azure's prefixes, and a ``/v1`` that a base URL lacks or has twice."""

from __future__ import annotations

import re
from collections.abc import Container

_PREFIX = re.compile(
    r"/openai(?:/v1)?/deployments/.+?(?=/(?:chat/)?completions$)|/openai(?=/v1/)|/v1(?=/v1/)"
)
_API = re.compile(r"/(?:chat/completions|completions|responses|messages|models|conversations)(?:/|$)")
"""Paths of APIs below ``/v1``."""
_MODEL_NAME = re.compile(r"(.*?/v[12]/+models/)(/*[^/].*)")
"""Paths that end with a model name, which may be a folder's path."""


def normalized(path: str, known: Container[str] = (), root_path: str = "") -> str:
    """Normalize a path; strip ``root_path`` and aliases unless the path is ``known``."""
    path = tidy_path(path)
    if path in known:
        return path
    if root_path and path.startswith(root_path + "/"):
        path = path.removeprefix(root_path)
    return without_alias(path)


def tidy_path(path: str) -> str:
    """Merge slashes of a path and strip the final one: client base URLs often end with a slash."""
    if "//" not in path and not path.endswith("/"):
        return path
    match = _MODEL_NAME.fullmatch(path)
    head, name = match.groups() if match is not None else (path, "")
    head = re.sub("/{2,}", "/", head)
    return head + name.rstrip("/") if name else head.rstrip("/") or "/"


def without_alias(path: str) -> str:
    """Return an API's path with ``/v1`` once, and without the prefixes of Azure's clients."""
    match = _PREFIX.match(path)
    path = path if match is None else path[match.end() :]
    return "/v1" + path if _API.match(path) else path
