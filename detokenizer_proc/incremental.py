"""Incremental detokenization. The concatenated text equals the tokenizer's ``decode`` of all ids.

`PieceTable` maps every id to its text, or to None if the text depends on state: a split character, a byte token, or the
first piece of a text. `Decoder` is that state. While it is *clean*, the caller may take texts from ``pieces``.

Decoder types (the first three use tables):

* byte level (GPT-2 alphabet): concatenated bytes, then UTF-8 with replacement characters;
* SentencePiece with byte fallback: ``Sequence[Replace…, ByteFallback, Fuse, Strip]`` and its subsets. If a run of byte
  tokens is not UTF-8, the tokenizers library replaces *every* byte of it. So the text of a run is final only when the
  run ends; until then its characters are `Decoder.tentative`;
* Metaspace;
* other decoders call the tokenizers library on a short window of tokens.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Protocol

from quintet.detokenizer_proc.decoder_spec import byte_level_bytes, byte_of
from quintet.detokenizer_proc.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """Decoding state of one token sequence."""

    clean: bool
    """No text is pending: ``pieces[token]``, if not None, is the next text without a call of `push`."""
    tentative: str
    """Characters completed by the last `push` that a later token could still turn into replacement characters."""
    tentative_length: int
    """Number of tentative characters of the current run."""
    revoked: bool
    """True if the last call turned tentative characters into replacement characters."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final."""

    def flush(self) -> str:
        """End the sequence; return the pending text."""

    def seal(self) -> str:
        """End the prompt; return its pending text. The bytes of an incomplete character remain pending."""


class PieceTable:
    """Text of every id, special tokens included. `skipping_special_tokens` returns the table without them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.spec = vocabulary.decoder
        self.skip_special_tokens = False
        self.num_ids = len(vocabulary.tokens)
        self.absent = frozenset(i for i, token in enumerate(vocabulary.tokens) if token is None)
        self.raw: list[bytes] = []
        """Bytes of each id decoded alone; empty for ids without a token."""
        self.pieces: list[str | None] = []
        """Text of each id, or None if `Decoder.push` must be called."""
        self.pending: list[str | None] = [None] * self.num_ids
        """Table for a decoder that is not clean: `Decoder.push` must be called for every id."""
        self.silent: list[str | None] = [""] * self.num_ids
        """Table for a request without detokenization."""
        self.is_byte = bytearray(self.num_ids)
        self._fill()

    def skipping_special_tokens(self, but: frozenset[str] = frozenset()) -> PieceTable:
        """Return a copy in which special tokens have empty text, except tokens that are a substring of a mark in ``but``."""
        table = copy.copy(self)
        table.skip_special_tokens = True
        tokens, special = self.vocabulary.tokens, self.vocabulary.special
        if but:
            special = frozenset(i for i in special if not any((tokens[i] or "\0") in mark for mark in but))
        table.absent = self.absent | special
        table.raw, table.pieces, table.is_byte = self.raw.copy(), self.pieces.copy(), self.is_byte.copy()
        for token_id in special:
            table.raw[token_id], table.pieces[token_id], table.is_byte[token_id] = b"", "", False
        return table

    def decoder(self, context: Sequence[int] = (), *, whole: bool = True) -> Decoder:
        """Return a decoder after ``context``: the prompt, or its tail if not ``whole``."""
        match self.spec.kind:
            case "bytes":
                return ByteDecoder(self, context)
            case "pieces":
                decoder: Decoder = PieceDecoder(self, at_start=whole)
            case "metaspace":
                decoder = MetaspaceDecoder(self, at_start=whole)
            case _:
                decoder = LibraryDecoder(self)
        if not whole:
            context = self._from_boundary(context)
        for token_id in context:
            decoder.push(token_id)
        if context:
            decoder.seal()
        return decoder

    def _from_boundary(self, tail: Sequence[int]) -> Sequence[int]:
        """Drop leading byte tokens that continue a character from before the tail."""
        first = 0
        while first < len(tail) and self.is_byte[tail[first]] and 0x80 <= self.raw[tail[first]][0] < 0xC0:
            first += 1
        return tail[first:]

    def text_of(self, token_id: int) -> str:
        """Return one token's text decoded alone, with invalid UTF-8 replaced."""
        return self.raw[token_id].decode("utf-8", "replace")

    def _fill(self) -> None:
        tokens = [token or "" for token in self.vocabulary.tokens]
        match self.spec.kind:
            case "bytes":
                self.raw = byte_level_bytes(tokens)
                self.pieces = [_text_or_none(raw) for raw in self.raw]
            case "pieces":
                self._fill_pieces(tokens)
            case "metaspace":
                space = self.spec.space
                self.pieces = [token.replace(space, " ") for token in tokens]
                self.raw = [piece.encode() for piece in self.pieces if piece is not None]
            case _:
                tokenizer = self.vocabulary.tokenizer
                assert tokenizer is not None, self.spec
                absent, decode = self.absent, tokenizer.decode
                self.pieces = ["" if i in absent else None for i in range(self.num_ids)]
                self.raw = [
                    b"" if i in absent else decode([i], skip_special_tokens=False).encode()
                    for i in range(self.num_ids)
                ]

    def _fill_pieces(self, tokens: Sequence[str]) -> None:
        spec = self.spec
        for token_id, token in enumerate(tokens):
            text = _replaced(token, spec.replacements)
            byte = byte_of(text) if spec.byte_fallback else None
            self.is_byte[token_id] = byte is not None
            self.raw.append(text.encode() if byte is None else bytes([byte]))
            self.pieces.append(text if byte is None else None)


def _replaced(token: str, replacements: Sequence[tuple[str, str]]) -> str:
    for old, new in replacements:
        token = token.replace(old, new)
    return token


def _text_or_none(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


class ByteDecoder:
    """Byte-level decoder. At most three bytes of an incomplete character are pending."""

    __slots__ = ("_pending", "_table", "clean")

    tentative = ""
    tentative_length = 0
    revoked = False

    def __init__(self, table: PieceTable, context: Sequence[int] = ()) -> None:
        self._table = table
        raw = table.raw
        data = b"".join([raw[token_id] for token_id in context])  # token boundaries do not matter
        self._pending = data[codecs.utf_8_decode(data, "replace", False)[1] :]
        self.clean = not self._pending

    def push(self, token_id: int) -> str:
        """Add the token's bytes; return the completed characters."""
        data = self._pending + self._table.raw[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self.clean = used == len(data)
        return text

    def flush(self) -> str:
        """Return a replacement character for a pending incomplete character."""
        text = self._pending.decode("utf-8", "replace")
        self._pending, self.clean = b"", True
        return text

    def seal(self) -> str:
        """Keep the pending bytes."""
        return ""


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

    def __init__(self, table: PieceTable, at_start: bool) -> None:
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
        text = self._end_run()
        if self._strip_left:
            text = self._strip(text)
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
        text = self._end_run()
        if self._strip_left:
            text = self._strip(text)
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

    def __init__(self, table: PieceTable, at_start: bool) -> None:
        self._table = table
        self.clean = not (at_start and table.spec.strip_first)

    def push(self, token_id: int) -> str:
        """Add a token."""
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

    def __init__(self, table: PieceTable) -> None:
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
