"""Finding marks in text that comes in pieces."""

from __future__ import annotations

import re


class Marks:
    """A set of marks, none of which lies in another: then the one that begins first also ends first, however text is cut."""

    def __init__(self, *marks: str) -> None:
        for mark in marks:
            inner = [other for other in marks if other != mark and other in mark]
            assert mark and not inner, f"{inner} in {mark!r}"
        self.marks = frozenset(marks)
        self._found = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._first = re.compile(
            "[" + re.escape("".join({mark[0] for mark in marks})) + "]" if marks else r"(?!)"
        )
        self._longest = max(map(len, marks), default=0)

    def split(self, text: str) -> tuple[str, str, str]:
        """Return the text before the first mark, the mark, and what follows it.

        Without a mark: what certainly is before any, an empty mark, and what may begin one.
        """
        match = self._found.search(text)
        if match is not None:
            return text[: match.start()], match[0], text[match.end() :]
        begin = len(text) - self._longest + 1
        for candidate in self._first.finditer(text, max(0, begin)):
            rest = text[candidate.start() :]
            if any(mark.startswith(rest) for mark in self.marks):
                return text[: candidate.start()], "", rest
        return text, "", ""

    def is_half(self, text: str) -> bool:
        """Whether ``text`` is the beginning of a mark that is no word, and at least half of it."""
        return any(
            mark.startswith(text) and 2 * len(text) >= len(mark) and not mark[0].isalnum()
            for mark in self.marks
        )

    def at_start(self, text: str) -> str | None:
        """Return the mark that ``text`` begins with; empty while it may yet become one, None when there is none."""
        match = self._found.match(text)
        if match is not None:
            return match[0]
        return "" if any(mark.startswith(text) for mark in self.marks) else None
