"""Decoder type of a tokenizer, parsed from the tokenizers library's serialized form, and token spellings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class DecoderSpec(msgspec.Struct, frozen=True):
    """Parameters of a tokenizer's decoder."""

    kind: str
    """``bytes``, ``pieces``, ``metaspace`` or ``library``."""
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    strip_count: int = 0
    space: str = ""
    strip_first: bool = False


def read_decoder(description: Mapping[str, Any] | None) -> DecoderSpec:
    """Parse a serialized decoder. An unsupported one gets kind ``library``."""
    if description is None:
        return DecoderSpec("library")
    steps = _steps(description)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderSpec("bytes")
    if kinds == ["Metaspace"]:
        return DecoderSpec(
            "metaspace",
            space=str(steps[0]["replacement"]),
            strip_first=steps[0].get("prepend_scheme") != "never",
        )
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = stripped = False
    strip, strip_count = "", 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not (
                byte_fallback or fused
            ):
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not (byte_fallback or fused):
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0} if (
                fused and not stripped
            ):
                stripped, strip, strip_count = True, content, start
            case _:
                return DecoderSpec("library")
    return DecoderSpec("pieces", tuple(replacements), byte_fallback, strip, strip_count)


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Flatten nested decoder sequences into one list."""
    inner = decoder.get("decoders")
    if decoder.get("type") != "Sequence" or not isinstance(inner, list):
        return [decoder]
    return [step for child in inner for step in _steps(child)]


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to bytes.

    Printable Latin-1 bytes map to themselves; the other bytes map to U+0100 and following, in order (Radford et al.,
    "Language Models are Unsupervised Multitask Learners", 2019, released code).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_bytes(tokens: Sequence[str]) -> list[bytes]:
    """Return the bytes of byte-level tokens. A token with a character outside the alphabet gives its UTF-8 bytes."""
    alphabet = byte_alphabet()
    # Latin-1 encodes each code point below 256 as that byte; characters outside the alphabet map to U+FFFD and fail.
    latin = {number: alphabet.get(chr(number), 0xFFFD) for number in range(256)}
    latin |= {ord(character): byte for character, byte in alphabet.items()}
    found = []
    for token in tokens:
        try:
            found.append(token.translate(latin).encode("latin-1"))
        except UnicodeEncodeError:
            found.append(token.encode())
    return found


def byte_of(token: str) -> int | None:
    """Return the byte of a token ``<0xNN>``; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        digits = token[3:5]
        if digits[0] == "+":  # the tokenizers library also accepts "+A"
            digits = digits[1:]
        try:
            return int(digits, 16) if digits.isalnum() and digits.isascii() else None
        except ValueError:
            return None
    return None
