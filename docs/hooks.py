"""Hooks of mkdocs: links to files outside of ``docs`` become plain paths."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave the documentation's folder."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2].partition("#")[0]))
        return f"{match[1]} (`{target.removeprefix('../')}`)" if target.startswith("..") else match[0]

    return LINK.sub(replace, markdown)
