"""Ids to text, one token at a time, equal to the tokenizer's own ``decode`` of the whole.

A `PieceTable` is built once from the tokenizer: for every id the text it stands for, where that text is complete by
itself, or None where it takes state to know (a split character, a byte token, the first piece of a text). A `Decoder`
is that state for one request. While a decoder is *clean* its caller may take texts straight from ``pieces``.

Three shapes of tokenizer decoder are walked as tables:

* byte level (GPT-2 alphabet): bytes of all tokens in a row, then UTF-8 with replacement characters;
* SentencePiece with byte fallback: ``Sequence[Replace…, ByteFallback, Fuse, Strip]`` and its subsets. The reference
  replaces *every* byte of a run of byte tokens when the run as a whole is not UTF-8, so a run is certain only when it
  ends; until then its characters are `Decoder.tentative`;
* Metaspace.

Anything else goes through the tokenizers library over a short window. Nothing here knows of requests or messages.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Protocol

from quintet.detokenizer_proc.decoder_spec import byte_of, through_alphabet
from quintet.detokenizer_proc.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """The text state of one sequence of tokens."""

    clean: bool
    """Nothing is pending: the next text is ``pieces[token]`` where that is not None, and `push` need not be called."""
    tentative: str
    """Characters the last `push` completed that a later token could still turn into replacement characters."""
    tentative_length: int
    """All such characters that are open now."""
    revoked: bool
    """Whether the last call did turn tentative characters into replacement characters."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that has become certain."""

    def flush(self) -> str:
        """End the sequence; return the text that was still pending, as ``decode`` of the whole has it."""

    def seal(self) -> str:
        """End the prompt; return its pending text but for the bytes of an incomplete character, which stay pending."""


class PieceTable:
    """What every id stands for, special tokens for themselves; `skipping_special_tokens` gives the other table."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.spec = vocabulary.decoder
        self.skip_special_tokens = False
        self.num_ids = len(vocabulary.tokens)
        self.absent = frozenset(i for i, token in enumerate(vocabulary.tokens) if token is None)
        self.raw: list[bytes] = []
        """The bytes of each id's text by itself; empty for ids that stand for nothing."""
        self.pieces: list[str | None] = []
        """The text of each id, or None where `Decoder.push` must be asked."""
        self.pending: list[str | None] = [None] * self.num_ids
        """The table of a decoder that is not clean: `Decoder.push` must always be asked."""
        self.silent: list[str | None] = [""] * self.num_ids
        """The table of a request that wants no text."""
        self.is_byte = bytearray(self.num_ids)
        self._fill()

    def skipping_special_tokens(self, but: frozenset[str] = frozenset()) -> PieceTable:
        """Return the table in which special tokens stand for nothing, but those spelled like one of ``but``, or a part of it.

        It is a copy, since few ids differ of a hundred thousand.
        """
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
        """Return the state after ``context``, the prompt or (not ``whole``) its tail."""
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
        """Drop byte tokens that continue a character which began before the tail."""
        first = 0
        while first < len(tail) and self.is_byte[tail[first]] and 0x80 <= self.raw[tail[first]][0] < 0xC0:
            first += 1
        return tail[first:]

    def text_of(self, token_id: int) -> str:
        """Return one token's text by itself, invalid UTF-8 replaced."""
        return self.raw[token_id].decode("utf-8", "replace")

    def _fill(self) -> None:
        tokens = [token or "" for token in self.vocabulary.tokens]
        match self.spec.kind:
            case "bytes":
                self.raw = through_alphabet(tokens)
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
    """Byte level: at most three bytes of an incomplete character are pending."""

    __slots__ = ("_pending", "_table", "clean")

    tentative = ""
    tentative_length = 0
    revoked = False

    def __init__(self, table: PieceTable, context: Sequence[int] = ()) -> None:
        self._table = table
        raw = table.raw
        data = b"".join([raw[token_id] for token_id in context])  # where bytes are cut changes nothing
        self._pending = data[codecs.utf_8_decode(data, "replace", False)[1] :]
        self.clean = not self._pending

    def push(self, token_id: int) -> str:
        """Add the token's bytes; return the characters they complete."""
        data = self._pending + self._table.raw[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self.clean = used == len(data)
        return text

    def flush(self) -> str:
        """Return a replacement character for an incomplete one."""
        text = self._pending.decode("utf-8", "replace")
        self._pending, self.clean = b"", True
        return text

    def seal(self) -> str:
        """Keep what is pending."""
        return ""


class PieceDecoder:
    """SentencePiece: pieces of text, byte tokens in runs, perhaps a space to strip from the very beginning."""

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
        self._partial = b""  # bytes of its incomplete last one
        self._num_bytes = 0
        self._broken = False  # the run is not UTF-8: every byte of it is replaced
        self.clean = not self._strip_left
        self.tentative = ""
        self.tentative_length = 0
        self.revoked = False

    def push(self, token_id: int) -> str:
        """Add a piece, which ends a run of bytes, or one byte of a run."""
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
            # Only a run that nothing was kept of yet can be stripped: it is no longer than what is stripped.
            to_strip = self._strip_left and not self.tentative_length
            self.tentative = self._lstripped_tentative(text) if to_strip else text
            self.tentative_length += len(self.tentative)
        return ""

    def _lstripped_tentative(self, text: str) -> str:
        """Return the part of ``text``, the newest of the run's characters, that stripping the beginning would leave."""
        run = "".join(self._parts)
        kept = len(run) - self._num_stripped(run)
        return text[-kept:] if kept < len(text) and kept else text if kept else ""

    def _end_run(self) -> str:
        """Return the run's text that was not returned yet: its characters, or a replacement for each byte."""
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
        """Return the text of the run that was open."""
        self.revoked = False
        text = self._end_run()
        if self._strip_left:
            text = self._strip(text)
        self.clean = not self._strip_left
        self.tentative = ""
        return text

    def seal(self) -> str:
        """Return the run's complete characters; an incomplete last one goes on as a run of its own."""
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
    """Metaspace: the first token of a text has no spaces, every other stands for itself."""

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
        """Return nothing: every token is certain at once."""
        return ""

    def seal(self) -> str:
        """Return nothing: every token is certain at once."""
        return ""


class LibraryDecoder:
    """Any other decoder: the library decodes a window of the newest tokens, with the ones before it as context.

    ``_ids[:_read]`` is the context, whose text was returned; it is what the previous window held. The text of the
    window is what ``decode`` gives for both beyond what it gives for the context, held back while it ends in a
    replacement character. Exact for decoders whose text of a token depends on its neighbours only; tokens that
    ``decode`` skips never enter the window, so it stays short.
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
        """Add a token; return the text that is complete."""
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
        """Return what was held back."""
        delta = self._decode(self._ids)[len(self._context_text) :]
        self._read = len(self._ids)
        self._context_text += delta
        return delta

    def seal(self) -> str:
        """Keep what is held back."""
        return ""

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self._table.vocabulary.tokenizer
        assert tokenizer is not None, self._table.spec
        text: str = tokenizer.decode(ids, skip_special_tokens=self._table.skip_special_tokens)
        return text
