"""Other spellings of marks: replaced by the usual ones before a parser reads the text."""

from __future__ import annotations

from collections.abc import Mapping

from quintet.detokenizer_proc.parsers.interface import ChannelText, Parser
from quintet.detokenizer_proc.parsers.marks import Marks


class Spellings:
    """Replaces other spellings of marks in the text of a parser."""

    def __init__(self, parser: Parser, usual: Mapping[str, str]) -> None:
        """``usual``: the usual spelling of each other one."""
        self._parser = parser
        self._usual = usual
        self._marks = Marks(*usual)
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        """See `Parser`."""
        return self._parser.is_reasoning

    def push(self, text: str) -> list[ChannelText]:
        """See `Parser`."""
        parts, at, text = list[str](), 0, self._held + text
        while True:
            begin, mark = self._marks.search(text, at)
            parts.append(text[at:begin])
            if not mark:
                break
            parts.append(self._usual[mark])
            at = begin + len(mark)
        self._held = text[begin:]
        return self._parser.push("".join(parts))

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """See `Parser`. Part of a mark at the end of a cut output is replaced by the same part of the usual one."""
        held = self._held
        if held and is_cut:
            usual = next(usual for mark, usual in self._usual.items() if mark.startswith(held))
            held = next(held[:end] for end in range(len(held), -1, -1) if usual.startswith(held[:end]))
        return self._parser.push(held) + self._parser.finish(is_cut=is_cut)
