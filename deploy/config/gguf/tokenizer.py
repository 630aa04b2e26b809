"""Conversion of a GGUF file's vocabulary to a tokenizer folder: ``tokenizer.json``, its config and chat templates.

The folder is created once and cached, because all other modules read tokenizers from folders.

`generation_of_gguf` reads the end-of-sequence ids and sampling defaults.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quintet.deploy.config.gguf import pre_tokenizers
from quintet.deploy.config.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from quintet.deploy.config.model import tokenizer_json
from quintet.deploy.config.user_files import cached_folder
from quintet.executor.checkpoints.gguf.header import Strings, Value
from quintet.executor.checkpoints.gguf.parts import GgufParts
from quintet.wire.errors import ConfigError

MAX_TOKENS = 1 << 21
_MAX_INSPECTED, _MAX_MERGED, _MIN_ALLOWANCE = 64, 8, 1 << 18
"""Limits of deriving merges of a SentencePiece vocabulary: inspected characters and merged characters, both as multiples of its
characters, and a minimum allowance. Real vocabularies have about two merges per token. Tokens that are prefixes of each other
would have a merge per character, with time and memory far above the file size.
"""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Token types: ``tokenizer.ggml.token_type``."""
_SPACE = "▁"
_KEY = "tokenizer.ggml."
_SPECIAL = ("bos", "eos", "unknown", "padding")
_NAMES = {"unknown": "unk", "padding": "pad"}
_TEMPLATE = "tokenizer.chat_template"


def tokenizer_of_gguf(parts: GgufParts, cache: Path) -> Path:
    """Return a folder in ``cache`` with the tokenizer of a file; create it if missing. Raises `ConfigError`."""
    header = parts.headers[0]
    made_by = b"".join(
        Path(module).read_bytes() for module in (__file__, pre_tokenizers.__file__, tokenizer_json.__file__)
    )
    named = f"{header.path.resolve()}:{header.size}:{header.modified_ns}".encode()
    target = cache / hashlib.sha256(made_by + named).hexdigest()[:16]

    def write(folder: Path) -> None:
        for name, content in _Vocabulary(parts).files().items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    return cached_folder(target, "tokenizer.json", write)


def tokens_of(parts: GgufParts) -> list[str]:
    """Return the vocabulary of a file. Raises `ConfigError`."""
    return _texts(parts, "tokens")


def _texts(parts: GgufParts, key: str) -> list[str]:
    value = parts.metadata.get(_KEY + key)
    if not isinstance(value, Strings) or value.count > MAX_TOKENS:
        raise ConfigError(
            f"{parts.path}: {_KEY}{key} is {_shown(value)}; it must be a list of at most {MAX_TOKENS} strings"
        )
    try:
        return value.texts()
    except UnicodeDecodeError:
        raise ConfigError(f"{parts.path}: {_KEY}{key} contains a string that is not UTF-8") from None


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value!r:.40}"


class _Added(msgspec.Struct, gc=False):
    """An added token, matched before pre-tokenization."""

    id: int
    content: str
    special: bool
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class _Vocabulary:
    """Tokenizer of one GGUF file."""

    def __init__(self, parts: GgufParts) -> None:
        self._parts, self._metadata = parts, parts.metadata
        kind = self._metadata.get(f"{_KEY}model")
        if kind not in ("gpt2", "llama"):
            raise ConfigError(
                f"{parts.path}: {_KEY}model is {_shown(kind)}; supported are gpt2 (BPE) and llama (SentencePiece): set"
                " --tokenizer to a folder with the model's tokenizer.json"
            )
        self._is_spm = kind == "llama"
        texts = tokens_of(parts)
        self._tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(texts)]
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        if len(self._ids) < len(self._tokens):
            duplicate = next(token for index, token in enumerate(self._tokens) if self._ids[token] != index)
            raise ConfigError(f"{parts.path}: {_KEY}tokens contains {duplicate!r:.60} twice")
        self._kinds = self._numbers("token_type", _NORMAL)

    def files(self) -> dict[str, bytes]:
        """Return the folder's files: name -> content."""
        config, templates = self._config(), self._templates()
        files = {
            "tokenizer.json": msgspec.json.encode(self._described()),
            "tokenizer_config.json": json.dumps(config, indent=1).encode(),
        }
        for name, text in templates.items():
            path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            files[path] = text.encode()
        return files

    def _described(self) -> dict[str, Any]:
        described = self._sentencepiece() if self._is_spm else self._byte_pairs()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "post_processor": self._post_processor(),
            **described,
        }

    def _byte_pairs(self) -> dict[str, Any]:
        pre = self._pre_tokenizer()
        cuts = [_split(cut) for cut in pre.cuts]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, level]},
            "decoder": level,
            "model": _model(self._ids, self._merges(), ignore_merges=pre.whole_words),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        prefixed = self._flag("add_space_prefix", True)
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepended = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
        decoders = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []),
        ]
        unknown = next(
            (t for t, kind in zip(self._tokens, self._kinds, strict=True) if kind == _UNKNOWN), None
        )
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": _model(
                self._ids, self._merges_by_score(), unk_token=unknown, byte_fallback=True, fuse_unk=True
            ),
        }

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._metadata.get(f"{_KEY}pre", "default")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise ConfigError(
                f"{self._parts.path}: {_KEY}pre is {name!r:.60}; supported are {', '.join(PRE_TOKENIZERS)}."
                " Set --tokenizer to a folder with the model's tokenizer.json"
            )
        return PRE_TOKENIZERS[name]

    def _merges(self) -> list[tuple[str, str]]:
        """Return the file's merges by priority, except merges with parts or results that are not tokens."""
        pairs, ids = [], self._ids
        for merge in _texts(self._parts, "merges"):
            between = merge.find(" ", 1)
            left, right = merge[:between], merge[between + 1 :]
            if between > 0 and left in ids and right in ids and left + right in ids:
                pairs.append((left, right))
        return pairs

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Return every split of a token into two tokens, by descending score."""
        scores, ids, tokens = self._numbers("scores", 0.0), self._ids, self._tokens
        order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
        existing_lengths = {len(token) for token in tokens}
        lengths = sorted(existing_lengths)
        num_characters = sum(map(len, tokens))
        budgets = [_MIN_ALLOWANCE + factor * num_characters for factor in (_MAX_INSPECTED, _MAX_MERGED)]
        pairs: list[tuple[str, str]] = []
        for index in order.tolist():
            token, length = tokens[index], len(tokens[index])
            if self._kinds[index] in (_UNKNOWN, _CONTROL, _BYTE):
                continue
            for cut in lengths[: bisect.bisect_left(lengths, length)]:
                if length - cut not in existing_lengths:
                    continue
                left = ids.get(token[:cut])
                right = None if left is None else ids.get(token[cut:])
                budgets[0] -= length
                if left is not None and right is not None:
                    budgets[1] -= length
                    pairs.append((tokens[left], tokens[right]))
                if min(budgets) < 0:
                    raise ConfigError(
                        f"{self._parts.path}: {_KEY}tokens has tokens of up to {lengths[-1]} characters with more merges than"
                        " a SentencePiece vocabulary"
                    )
        return pairs

    def _added(self) -> list[_Added]:
        return [
            _Added(index, token, kind != _USER_DEFINED)
            for index, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def _post_processor(self) -> dict[str, object] | None:
        adds_bos = True if self._is_spm else self._pre_tokenizer().adds_bos
        first = self._special("bos") if self._flag("add_bos_token", adds_bos) else None
        last = self._special("eos") if self._flag("add_eos_token", False) else None
        return tokenizer_json.around(
            *(None if each is None else (each, self._ids[each]) for each in (first, last))
        )

    def _config(self) -> dict[str, Any]:
        special = {f"{_NAMES.get(name, name)}_token": self._special(name) for name in _SPECIAL}
        config = {key: token for key, token in special.items() if token is not None}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **config}

    def _special(self, name: str) -> str | None:
        index = self._metadata.get(f"{_KEY}{name}_token_id")
        return self._tokens[index] if type(index) is int and 0 <= index < len(self._tokens) else None

    def _templates(self) -> dict[str, str]:
        """Return the chat templates: name -> text."""
        found: dict[str, str] = {}
        for key, text in self._metadata.items():
            name = "default" if key == _TEMPLATE else key.removeprefix(f"{_TEMPLATE}.")
            if (name == "default" or name != key) and isinstance(text, str):
                if not name.replace("_", "").replace("-", "").isalnum() or len(name) > 64:
                    raise ConfigError(
                        f"{self._parts.path}: {key!r:.90} is not a valid name of a chat template"
                    )
                found[name] = text
        return found

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_KEY + key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self._parts.path}: {_KEY}{key} is {value!r:.40}; it must be true or false")
        return value

    def _numbers(self, key: str, default: float) -> list[Any]:
        """Return one number per token."""
        value, count = self._metadata.get(_KEY + key), len(self._tokens)
        if value is None:
            return [default] * count
        if not isinstance(value, np.ndarray) or len(value) < count:
            raise ConfigError(
                f"{self._parts.path}: {_KEY}{key} is {value!r:.40}; it must have {count} numbers"
            )
        return list(value[:count].tolist())


def _split(cut: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}


def _model(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **switches: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**defaults, **switches, "vocab": ids, "merges": merges}


_ENDING_KEYS = ("eos", "eot", "eom")
_ENDINGS = (
    *(
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
    ),
    *(
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
    ),
    *("<eos>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that llama.cpp treats as end of generation: files name one of them, chat templates may use others."""
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""GGUF keys of sampling defaults, and the parameters."""


def generation_of_gguf(parts: GgufParts) -> dict[str, object]:
    """Return the equivalent of ``generation_config.json``. Raises `ConfigError`."""
    sampling = {ours: parts.metadata.get(theirs) for theirs, ours in SAMPLING.items()}
    found = {key: value for key, value in sampling.items() if isinstance(value, int | float)}
    return {**found, "eos_token_id": _ending_ids(parts.metadata, tokens_of(parts))}


def _ending_ids(metadata: Mapping[str, Value], tokens: Sequence[str]) -> list[int]:
    """Return the ids that end a response, ``eos`` first."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _ENDING_KEYS]
    ids = [each for each in named if type(each) is int and 0 <= each < len(tokens)]
    found = {token: index for index, token in enumerate(tokens) if token in _ENDINGS}
    if "<|end|>" in found and "<|return|>" in found:
        del found["<|end|>"]  # ends a message in gpt-oss, but a response has several messages
    return list(dict.fromkeys([*ids, *sorted(found.values())]))
