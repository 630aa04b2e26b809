"""Location of ``tokenizer.json``; converts slow tokenizers once, adds declared tokens, and caches the result."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from quintet.deploy.config.model import tokenizer_json
from quintet.deploy.config.user_files import cached_folder, user_cache
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import is_gguf, read_json

_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
_MORE_FILES = (
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)
"""Further files that a conversion reads."""

_CONVERT = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], use_fast=True, local_files_only=True, mistral_format=False)
if not tokenizer.is_fast:
    sys.exit("transformers has no fast version of this tokenizer")
tokenizer.save_pretrained(sys.argv[2])
"""


_TEKKEN = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens of Mistral's ``tekken.json``, which has no names for them."""

SET_TOKENIZER = "set --tokenizer to a folder that has one"


def tokenizer_folder(folder: Path, cache: Path | None = None, advice: str = SET_TOKENIZER) -> Path:
    """Return a folder with ``tokenizer.json``. Raises `ConfigError` with ``advice`` at its end.

    transformers, in a subprocess, converts a slow tokenizer into ``cache`` (default: ``$XDG_CACHE_HOME/quintet/tokenizers``).
    The tokenizer of a GGUF file is converted by Quintet. Added tokens and BOS that only ``tokenizer_config.json`` declares, and
    Tekken's expression, are written into a copy of ``tokenizer.json`` in ``cache``.
    """
    if is_gguf(folder):  # imported only here: numpy starts threads, after which the supervisor must not fork
        from quintet.deploy.config.gguf.tokenizer import tokenizer_of_gguf
        from quintet.executor.checkpoints.gguf.parts import read_parts

        return tokenizer_of_gguf(read_parts(folder), cache or _default_cache())
    if (folder / "tokenizer.json").is_file():
        return _completed(folder, cache)
    slow = next((name for name in _SLOW_FILES if (folder / name).is_file()), None)
    if slow is None:
        raise ConfigError(f"{folder} has no tokenizer.json: {advice}")
    target = (cache or _default_cache()) / _key_of(folder)
    return cached_folder(target, "tokenizer.json", lambda made: _convert(folder, slow, made, advice))


def _completed(folder: Path, cache: Path | None) -> Path:
    """Return the folder; a copy of its tokenizer if ``tokenizer.json`` needs declared tokens, BOS or Tekken's expression."""
    config = folder / "tokenizer_config.json"
    declared = read_json(config) if config.is_file() else {}
    tokenizer = tokenizer_json.completed((folder / "tokenizer.json").read_bytes(), declared)
    if tokenizer is None:
        return folder

    def write(made: Path) -> None:
        (made / "tokenizer.json").write_bytes(tokenizer)
        for path in (config, folder / "special_tokens_map.json"):
            if path.is_file():
                shutil.copy(path, made)

    return cached_folder((cache or _default_cache()) / _key_of(folder), "tokenizer.json", write)


def _key_of(folder: Path) -> str:
    """Return a key that changes with every file that the conversion reads, and with the code."""
    paths = [folder / name for name in ("tokenizer.json", *_SLOW_FILES, *_MORE_FILES)]
    paths += [Path(module) for module in (__file__, tokenizer_json.__file__)]
    stats = [(path.name, path.stat()) for path in paths if path.is_file()]
    versions = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(f"{folder}:{versions}".encode()).hexdigest()[:16]


def _convert(folder: Path, slow: str, made: Path, advice: str) -> None:
    """Convert the slow tokenizer of ``folder`` into the folder ``made``. Raises `ConfigError`."""
    converted = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(folder), str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    if converted.returncode != 0 or not (made / "tokenizer.json").is_file():
        last = (converted.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"{folder} has only {slow}, and transformers could not convert it to tokenizer.json (sentencepiece may need"
            f" `pip install sentencepiece`): {last}. Otherwise {advice}"
        )
    if slow == "tekken.json":
        _complete_tekken(made)


def _complete_tekken(made: Path) -> None:
    """Name the special tokens of a converted ``tekken.json``, and add BOS to texts, as Mistral's own library does."""
    config, tokenizer = made / "tokenizer_config.json", made / "tokenizer.json"
    declared = _TEKKEN | (read_json(config) if config.is_file() else {})
    config.write_text(json.dumps(declared))
    tokenizer.write_bytes(tokenizer_json.with_bos(tokenizer.read_bytes(), str(declared["bos_token"])))


def _default_cache() -> Path:
    return user_cache() / "tokenizers"
