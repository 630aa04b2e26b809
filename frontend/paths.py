"""Which row of the route table a path leads to. Knows no method and no handler.

/v1/models              itself
/v1/streams/{id}        what follows is one name: without a slash, not empty
/v1/models/{id:path}    what follows may be anything
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

RowT = TypeVar("RowT")

_REST = ":path}"


class PathTable(Generic[RowT]):
    """Rows by their paths. A path that is spelled out comes before those that have a part open."""

    def __init__(self, rows: Iterable[tuple[str, RowT]]) -> None:
        self._whole: dict[str, RowT] = {}
        self._open: list[tuple[str, str, bool, RowT]] = []
        """Beginning, name of what follows, whether that may be anything, and the row."""
        for path, row in rows:
            beginning, brace, name = path.partition("{")
            if brace:
                self._open.append(
                    (beginning, name.removesuffix(_REST).removesuffix("}"), name.endswith(_REST), row)
                )
            else:
                self._whole[path] = row

    def find(self, path: str) -> tuple[RowT, dict[str, str]] | None:
        """Return the row, and what stands in the path's open part by its name; None where nothing matches."""
        row = self._whole.get(path)
        if row is not None:
            return row, {}
        for beginning, name, is_rest, candidate in self._open:
            if path.startswith(beginning):
                value = path[len(beginning) :]
                if is_rest or (value and "/" not in value):
                    return candidate, {name: value}
        return None
