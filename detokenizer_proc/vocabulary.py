"""Vocabulary of a tokenizer: the token of every id, the special tokens and the decoder.

A simple ``tokenizer.json`` is read without the tokenizers library. The library also builds merges, tries and caches for
encoding. That takes several times as long as the rest of the boot, and as much memory as the rest of the process. Other
files, broken ones included, are loaded by the library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quintet.wire.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # imported at run time only if a file needs it

PLAIN_DECODERS = frozenset({"bytes", "pieces"})
"""Decoder kinds that the file describes completely, without defaults of the library."""


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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token of every id, special ids and decoder."""

    tokens: Sequence[str | None]
    """By id; None for an unused id."""
    special: frozenset[int]
    """Ids of special tokens."""
    decoder: DecoderSpec
    tokenizer: Tokenizer | None = None
    """Decodes if the decoder's kind is ``library``."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_ids: int = 0) -> Vocabulary:
        """Build from a library tokenizer. Ids from the end of its vocabulary up to ``num_ids`` are unused."""
        added = tokenizer.get_added_tokens_decoder()
        size = max(num_ids, tokenizer.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added))
        decoder = tokenizer.decoder
        return cls(
            [tokenizer.id_to_token(token_id) for token_id in range(size)],
            frozenset(token_id for token_id, token in added.items() if token.special),
            read_decoder(None if decoder is None else msgspec.json.decode(decoder.__getstate__())),
            tokenizer,
        )


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool


class _Model(msgspec.Struct):
    type: str
    vocab: dict[str, int]


class _File(msgspec.Struct):
    """Parsed part of a ``tokenizer.json``."""

    model: _Model
    added_tokens: list[_AddedToken]
    decoder: dict[str, Any] | None


def load_vocabulary(folder: str | Path, num_ids: int) -> Vocabulary:
    """Read ``tokenizer.json``. Raises `ConfigError` with the path if it is missing or invalid."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; set --tokenizer to a folder with a tokenizer.json.")
    plain = read_plain(path, num_ids)
    if plain is not None:
        return plain
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: the tokenizers library cannot read it: {error}") from error
    return Vocabulary.of(tokenizer, num_ids)


def read_plain(path: Path, num_ids: int) -> Vocabulary | None:
    """Read a byte-pair vocabulary with the same ids as the library assigns; None for any other file."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError):
        return None
    vocab, spec = file.model.vocab, read_decoder(file.decoder)
    if file.model.type != "BPE" or spec.kind not in PLAIN_DECODERS or not _numbered_as_stated(file):
        return None
    spelled = {token_id: token for token, token_id in vocab.items()}
    if len(spelled) < len(vocab) or min(spelled, default=0) < 0:
        return None
    spelled |= {token.id: token.content for token in file.added_tokens}
    size = max(num_ids, len(spelled), *(token.id + 1 for token in file.added_tokens))
    special = frozenset(token.id for token in file.added_tokens if token.special)
    return Vocabulary([spelled.get(token_id) for token_id in range(size)], special, spec)


def _numbered_as_stated(file: _File) -> bool:
    """Return whether each added token's id is the library's: its id in the vocabulary, otherwise the next free id."""
    vocab = file.model.vocab
    contents: set[str] = set()
    following = len(vocab)
    for token in file.added_tokens:
        if not token.content or token.content in contents or token.id != vocab.get(token.content, following):
            return False
        contents.add(token.content)
        following = max(following, token.id + 1)
    return True


def read_decoder(description: Mapping[str, Any] | None) -> DecoderSpec:
    """Parse a decoder in the tokenizers library's serialized form. An unsupported one gets kind ``library``."""
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
