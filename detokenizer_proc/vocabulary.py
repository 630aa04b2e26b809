"""Vocabulary of a tokenizer: the token of every id, the special tokens and the decoder.

A simple ``tokenizer.json`` is read without the tokenizers library. The library also builds merges, tries and caches for
encoding. That takes several times as long as the rest of the boot, and as much memory as the rest of the process. Other
files, broken ones included, are loaded by the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quintet.detokenizer_proc.decoder_spec import DecoderSpec, read_decoder
from quintet.wire.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # imported at run time only if a file needs it

PLAIN_DECODERS = frozenset({"bytes", "pieces"})
"""Decoder kinds that the file describes completely, without defaults of the library."""


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
    return read_plain(path, num_ids) or _by_library(path, num_ids)


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


def _by_library(path: Path, num_ids: int) -> Vocabulary:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: the tokenizers library cannot read it: {error}") from error
    return Vocabulary.of(tokenizer, num_ids)
