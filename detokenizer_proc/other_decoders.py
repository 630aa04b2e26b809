"""Decoders for tokenizers that are not byte level: SentencePiece pieces, Metaspace, and the tokenizers library.

`quintet.detokenizer_proc.incremental` describes the types, and has the table of pieces and the byte-level decoder.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from quintet.detokenizer_proc.vocabulary import DecoderSpec, Vocabulary

REPLACEMENT = "\ufffd"


class Pieces(Protocol):
    """The part of `quintet.detokenizer_proc.incremental.PieceTable` that decoders read."""

    vocabulary: Vocabulary
    spec: DecoderSpec
    skip_special_tokens: bool
    absent: frozenset[int]
    raw: list[bytes]
    pieces: list[str | None]
    is_byte: bytearray


class PieceDecoder:
    """SentencePiece decoder: text pieces, runs of byte tokens, optional stripping of leading spaces."""

    __slots__ = (
        "_broken",
        "_num_bytes",
        "_partial",
        "_parts",
        "_strip_left",
        "_table",
        "clean",
        "revoked",
        "tentative",
        "tentative_length",
    )

    def __init__(self, table: Pieces, at_start: bool) -> None:
        self._table = table
        self._strip_left = table.spec.strip_count if at_start else 0
        self._parts: list[str] = []  # complete characters of the run
        self._partial = b""  # bytes of the run's incomplete last character
        self._num_bytes = 0
        self._broken = False  # the run is not UTF-8: all its bytes are replaced
        self.clean = not self._strip_left
        self.tentative = ""
        self.tentative_length = 0
        self.revoked = False

    def push(self, token_id: int) -> str:
        """Add a byte to the current run, or a text piece, which ends the run."""
        table = self._table
        self.tentative = ""
        self.revoked = False
        if table.is_byte[token_id]:
            return self._push_byte(table.raw[token_id])
        if token_id in table.absent:
            return ""
        piece = table.pieces[token_id]
        assert piece is not None, token_id
        text = self._end_run() + piece if self._num_bytes else piece
        if self._strip_left:
            text = self._strip(text)
        self.clean = not self._strip_left
        return text

    def _push_byte(self, byte: bytes) -> str:
        self._num_bytes += 1
        self.clean = False
        if self._broken:
            return REPLACEMENT
        self._partial += byte
        try:
            text, used = codecs.utf_8_decode(self._partial, "strict", False)
        except UnicodeDecodeError:
            self._broken = self.revoked = True
            self._strip_left = self.tentative_length = 0
            self._parts.clear()
            self._partial = b""
            return REPLACEMENT * self._num_bytes
        if used:
            self._parts.append(text)
            self._partial = b""
            # Stripping applies only while the whole run so far was stripped.
            to_strip = self._strip_left and not self.tentative_length
            self.tentative = self._lstripped_tentative(text) if to_strip else text
            self.tentative_length += len(self.tentative)
        return ""

    def _lstripped_tentative(self, text: str) -> str:
        """Return the part of ``text``, the run's newest characters, that remains after stripping the run's beginning."""
        run = "".join(self._parts)
        kept = len(run) - self._num_stripped(run)
        return text[-kept:] if kept < len(text) and kept else text if kept else ""

    def _end_run(self) -> str:
        """End the run; return its text that was not returned yet: characters, or a replacement per byte."""
        if self._broken:
            text = ""
        elif self._partial:
            text = REPLACEMENT * self._num_bytes
            self.revoked = True
        else:
            text = "".join(self._parts)
        self._parts.clear()
        self._partial, self._num_bytes, self._broken = b"", 0, False
        self.tentative_length = 0
        return text

    def _num_stripped(self, text: str) -> int:
        count = 0
        while count < self._strip_left and text.startswith(self._table.spec.strip, count):
            count += 1
        return count

    def _strip(self, text: str) -> str:
        count = self._num_stripped(text)
        self._strip_left = 0 if count < len(text) else self._strip_left - count
        return text[count:]

    def flush(self) -> str:
        """Return the text of the open run."""
        self.revoked = False
        text = self._strip(self._end_run())
        self.clean = not self._strip_left
        self.tentative = ""
        return text

    def seal(self) -> str:
        """Return the run's complete characters. An incomplete last character starts a new run."""
        if self._broken:
            return ""
        partial = self._partial
        self._num_bytes -= len(partial)
        self._partial = b""
        text = self._strip(self._end_run())
        self._partial, self._num_bytes = partial, len(partial)
        self.clean = not (self._strip_left or partial)
        self.tentative = ""
        return text


class MetaspaceDecoder:
    """Metaspace decoder: removes the spaces of a text's first token."""

    __slots__ = ("_table", "clean")

    tentative = ""
    tentative_length = 0
    revoked = False

    def __init__(self, table: Pieces, at_start: bool) -> None:
        self._table = table
        self.clean = not (at_start and table.spec.strip_first)

    def push(self, token_id: int) -> str:
        table = self._table
        if self.clean or token_id in table.absent:
            return table.pieces[token_id] or ""
        self.clean = True
        token = table.vocabulary.tokens[token_id] or ""
        return token.replace(table.spec.space, "")

    def flush(self) -> str:
        """Return an empty string: every text is final at once."""
        return ""

    def seal(self) -> str:
        """Return an empty string: every text is final at once."""
        return ""


class LibraryDecoder:
    """Decoder by the tokenizers library: decodes a window of the newest tokens, with the previous window as context.

    ``_ids[:_read]`` is the context; its text was returned before. The new text is the decoded window minus the decoded
    context. It is held back while it ends in a replacement character. The result is exact if a token's text depends
    only on adjacent tokens. Skipped tokens never enter the window, so it remains short.
    """

    __slots__ = ("_context_text", "_ids", "_read", "_table", "clean")

    tentative = ""
    tentative_length = 0
    revoked = False

    def __init__(self, table: Pieces) -> None:
        self._table = table
        self._ids: list[int] = []
        self._read = 0
        self._context_text = ""
        self.clean = False

    def push(self, token_id: int) -> str:
        """Add a token; return the completed text."""
        if token_id in self._table.absent:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._context_text):
            return ""
        delta = text[len(self._context_text) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._context_text = self._decode(self._ids)
        return delta

    def flush(self) -> str:
        """Return the text that was held back."""
        delta = self._decode(self._ids)[len(self._context_text) :]
        self._read = len(self._ids)
        self._context_text += delta
        return delta

    def seal(self) -> str:
        """Keep the text that is held back."""
        return ""

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self._table.vocabulary.tokenizer
        assert tokenizer is not None, self._table.spec
        text: str = tokenizer.decode(ids, skip_special_tokens=self._table.skip_special_tokens)
        return text
