"""What a tokenizer's ids are spelled like: all of it that turning ids into text needs.

Read without the tokenizers library where ``tokenizer.json`` is plain. The library builds what *encoding* needs as well
(merges, tries, caches), which takes several times as long as all the rest of this process's boot, and as much memory as
the rest of the process. Whatever is not plain is left to the library, and so is the verdict on a broken file.
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
    from tokenizers import Tokenizer  # imported where a file is left to it

PLAIN_DECODERS = frozenset({"bytes", "pieces"})
"""Kinds whose description in the file leaves nothing out that the library would fill in."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every id's spelling."""

    tokens: Sequence[str | None]
    """By id; None where one stands for nothing."""
    special: frozenset[int]
    """Ids of special tokens."""
    decoder: DecoderSpec
    tokenizer: Tokenizer | None = None
    """Who decodes where the decoder's kind is ``library``."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_ids: int = 0) -> Vocabulary:
        """Ask the library. Ids from the vocabulary's end up to ``num_ids`` stand for nothing, as in its ``decode``."""
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
    """What matters here of a ``tokenizer.json``."""

    model: _Model
    added_tokens: list[_AddedToken]
    decoder: dict[str, Any] | None


def load_vocabulary(folder: str | Path, num_ids: int) -> Vocabulary:
    """Read ``tokenizer.json``. Raises `ConfigError` naming the file when it is missing or unreadable."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a folder with a tokenizer.json as --tokenizer.")
    return read_plain(path, num_ids) or _by_library(path, num_ids)


def read_plain(path: Path, num_ids: int) -> Vocabulary | None:
    """Read a byte-pair vocabulary whose ids are what the library would make them; None for any other file."""
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
    """Whether the file states for each added token the id that the library gives it: the vocabulary's, else the next."""
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
        raise ConfigError(f"{path} is not a tokenizer the tokenizers library can read: {error}") from error
    return Vocabulary.of(tokenizer, num_ids)
