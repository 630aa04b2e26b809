"""Streaming search for marks (fixed strings)."""

from __future__ import annotations

import re
from functools import lru_cache


class Marks:
    """A set of marks, none a substring of another: so the mark that begins first also ends first, for any chunking."""

    def __init__(self, *marks: str) -> None:
        self.marks = frozenset(marks)
        self._found, self._first = _patterns(marks)
        self._longest = max(map(len, marks), default=0)

    def split(self, text: str) -> tuple[str, str, str]:
        """Return the text before the first mark, the mark, and the text after it.

        Without a mark: the text that precedes any mark, an empty mark, and a suffix that may begin one.
        """
        begin, mark = self.search(text)
        return text[:begin], mark, text[begin + len(mark) :]

    def search(self, text: str, at: int = 0) -> tuple[int, str]:
        """Return the position of the first mark from ``at``, and the mark.

        Without a mark: the position of a suffix that may begin one, or the end, and an empty mark.
        """
        match = self._found.search(text, at)
        if match is not None:
            return match.start(), match[0]
        begin = len(text) - self._longest + 1
        for candidate in self._first.finditer(text, max(at, begin)):
            rest = text[candidate.start() :]
            if any(mark.startswith(rest) for mark in self.marks):
                return candidate.start(), ""
        return len(text), ""

    def is_half(self, text: str) -> bool:
        """Return whether ``text`` is at least half of a mark, from its beginning. Marks that are words do not count."""
        return any(
            mark.startswith(text) and 2 * len(text) >= len(mark) and not mark[0].isalnum()
            for mark in self.marks
        )

    def at_start(self, text: str) -> str | None:
        """Return the mark at the start of ``text``; empty if ``text`` may become one; None otherwise."""
        match = self._found.match(text)
        if match is not None:
            return match[0]
        return "" if any(mark.startswith(text) for mark in self.marks) else None


@lru_cache(maxsize=1024)
def _patterns(marks: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of the marks and that of their first characters. Parsers are created for each request and call."""
    for mark in marks:
        inner = [other for other in marks if other != mark and other in mark]
        assert mark and not inner, f"{inner} in {mark!r}"
    if not marks:
        return re.compile(r"(?!)"), re.compile(r"(?!)")
    first = "".join(sorted({mark[0] for mark in marks}))
    return re.compile("|".join(map(re.escape, marks))), re.compile(f"[{re.escape(first)}]")
