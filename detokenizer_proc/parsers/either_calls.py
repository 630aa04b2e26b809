"""Tool calls of two formats with the same marks, for models that write another format than their template's."""

from __future__ import annotations

from quintet.detokenizer_proc.parsers.interface import ChannelText
from quintet.detokenizer_proc.parsers.machine import MAX_SLICE, CallReader, slices


class EitherCalls:
    """Parses content with one reader, and the calls of a second format with another."""

    is_reasoning = False

    def __init__(self, first: CallReader, second: CallReader, openings: tuple[str, ...]) -> None:
        """``openings``: text after a mark that begins a call of the second format."""
        self._reader, self._other = first, second
        first.stop_at(openings)
        second.stop_at_content()

    def push(self, text: str) -> list[ChannelText]:
        """See `Parser`."""
        if len(text) <= MAX_SLICE:
            return self._follow(self._reader.push(text))
        return [delta for part in slices(text) for delta in self.push(part)]

    def finish(self, *, is_cut: bool = False) -> list[ChannelText]:
        """See `Parser`."""
        return self._follow(self._reader.finish(is_cut=is_cut))

    def _follow(self, deltas: list[ChannelText]) -> list[ChannelText]:
        while self._reader.is_stopped:
            self._reader, self._other = self._other, self._reader
            deltas = deltas + self._reader.resume(self._other)
        return deltas
