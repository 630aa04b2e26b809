"""Which kind of decoder a tokenizer has, read from its own description, and what its tokens spell.

Knows the tokenizers library's serialized form; knows no ids and no state.
"""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer


class DecoderSpec(msgspec.Struct, frozen=True):
    """What of a tokenizer's decoder decides how ids become text."""

    kind: str
    """``bytes``, ``pieces``, ``metaspace`` or ``library``."""
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    strip_count: int = 0
    space: str = ""
    strip_first: bool = False


def read_decoder(tokenizer: Tokenizer) -> DecoderSpec:
    """Recognise the tokenizer's decoder; an unknown one is left to the library."""
    if tokenizer.decoder is None:
        return DecoderSpec("library")
    steps = _steps(msgspec.json.decode(tokenizer.decoder.__getstate__()))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return DecoderSpec("bytes")
    if [step["type"] for step in steps] == ["Metaspace"]:
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


def _steps(decoder: dict[str, object]) -> list[dict[str, object]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    inner = decoder["decoders"]
    assert isinstance(inner, list), decoder
    return [step for child in inner for step in _steps(child)]


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to the bytes they stand for.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in order (Radford et
    al., "Language Models are Unsupervised Multitask Learners", 2019, released code).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_of(token: str) -> int | None:
    """Return the byte a token of the form ``<0xNN>`` stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        digits = token[3:5]
        if digits[0] == "+":  # the reference parses "+A" as a number too
            digits = digits[1:]
        try:
            return int(digits, 16) if digits.isalnum() and digits.isascii() else None
        except ValueError:
            return None
    return None
