"""Encodings of request bodies: gzip and deflate (RFC 9110, section 8.4.1), byte order marks, and charsets."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.params import shown

ACCEPTED = "gzip, deflate"
"""Accepted Content-Encoding values, in addition to ``identity``."""
CHUNK_BYTES = 256 << 10
"""Maximum bytes decompressed at once; other requests run in between."""
BOM = b"\xef\xbb\xbf"
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
"""Window sizes of `zlib`, which select the expected header."""
_DEFLATED = 8
"""Low bits of a zlib header's first byte. Clients send deflate with and without the header."""
_CHARSETS = {
    "iso-8859-1",
    "iso-8859-15",
    "latin1",
    "latin-1",
    "windows-1252",
    "cp1252",
    "utf-16",
    "utf-16le",
    "utf-16be",
    "utf-32",
}
"""Accepted declared charsets; some other Python codecs are no text encodings."""


class Inflater:
    """Incremental decompressor of one body."""

    def __init__(self, coding: str) -> None:
        """``coding``: ``gzip`` or ``deflate``."""
        self._coding = coding
        self._stream = zlib.decompressobj(_GZIP if coding == "gzip" else _ZLIB)
        self._is_started = False

    def feed(self, compressed: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes, at most `CHUNK_BYTES` at once. Raises `RequestError`."""
        if not self._is_started and compressed:
            self._is_started = True
            if self._coding == "deflate" and compressed[0] & 0x0F != _DEFLATED:
                self._stream = zlib.decompressobj(_RAW)
        while compressed:
            if self._stream.eof:  # a gzip file may have several members
                if self._coding != "gzip":
                    raise self._broken("there are bytes after its end")
                self._stream = zlib.decompressobj(_GZIP)
            try:
                chunk = self._stream.decompress(compressed, CHUNK_BYTES)
            except zlib.error as error:
                raise self._broken(str(error)) from None
            compressed = self._stream.unconsumed_tail or self._stream.unused_data
            if chunk:
                yield chunk

    def check_end(self) -> None:
        """Check that the compressed data is complete. Raises `RequestError`."""
        if self._is_started and not self._stream.eof:
            raise self._broken("its end is missing")

    def _broken(self, reason: str) -> RequestError:
        return invalid(
            f"The request body cannot be decompressed: Content-Encoding is {self._coding}, but {reason}. Compress the JSON "
            "again, or send it uncompressed without the header.",
        )


def inflater_of(content_encoding: str) -> Inflater | None:
    """Return the decompressor for a Content-Encoding; None if the body is not compressed. Raises `RequestError`."""
    codings = [word.strip().lower() for word in content_encoding.split(",")]
    codings = [word.removeprefix("x-") for word in codings if word not in {"", "identity", "utf-8", "utf8"}]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in {"gzip", "deflate"}:
        raise RequestError(
            ErrorCode.UNSUPPORTED_MEDIA,
            f"Content-Encoding is {shown(content_encoding)}; allowed is one of {ACCEPTED}. Use one of these, or send "
            "the JSON uncompressed without the header.",
        )
    return Inflater(codings[0])


def as_utf8(body: bytes, content_type: str) -> bytes:
    """Return a JSON text in UTF-8 without a byte order mark. Raises `RequestError`.

    JSON is UTF-8 (RFC 8259); UTF-16 and UTF-32 are detected from the first bytes. The charset of ``content_type`` counts only
    for a body that is not UTF-8: many clients declare a wrong one.
    """
    if body.startswith(BOM):
        return body[len(BOM) :]
    charset = ""
    if body[:1] in {b"\xfe", b"\xff"} or b"\0" in body[:4]:
        charset = json.detect_encoding(body)
    elif "charset" in content_type.lower():
        named = _charset_of(content_type)
        charset = named if named in _CHARSETS and not _is_utf8(body) else ""
    if not charset:
        return body
    try:
        return body.decode(charset).encode()
    except UnicodeError as error:
        raise invalid(f"The request body is not valid {charset}: {error}. Send JSON in UTF-8.") from None


def _charset_of(content_type: str) -> str:
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"').lower()
    return ""


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
