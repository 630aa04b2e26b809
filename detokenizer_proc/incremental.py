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

from quintet.detokenizer_proc.other_decoders import LibraryDecoder, MetaspaceDecoder, PieceDecoder
from quintet.detokenizer_proc.vocabulary import Vocabulary, byte_level_bytes, byte_of


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
    """Text of every id, special tokens included; `skipping` is the table without them."""

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
        self.skipping = self.skipping_special_tokens()

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
            text = token
            for old, new in spec.replacements:
                text = text.replace(old, new)
            byte = byte_of(text) if spec.byte_fallback else None
            self.is_byte[token_id] = byte is not None
            self.raw.append(text.encode() if byte is None else bytes([byte]))
            self.pieces.append(text if byte is None else None)


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
