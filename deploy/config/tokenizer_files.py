"""The tokenizer's folder: one with ``tokenizer.json``, converted once from a slow tokenizer if it must be."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from quintet.deploy.config.caches import user_cache
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import is_gguf

_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")

_CONVERT = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], use_fast=True, local_files_only=True)
if not tokenizer.is_fast:
    sys.exit("transformers has no fast version of this tokenizer")
tokenizer.save_pretrained(sys.argv[2])
"""


NAME_ANOTHER = "name a folder that has one with --tokenizer"


def tokenizer_folder(folder: Path, cache: Path | None = None, way_out: str = NAME_ANOTHER) -> Path:
    """Return a folder with ``tokenizer.json`` for the tokenizer in ``folder``. Raises `ConfigError` that ends with ``way_out``.

    A folder that only has a slow tokenizer is converted by transformers, in a process of its own, into ``cache``
    (default: ``$XDG_CACHE_HOME/quintet/tokenizers``), where the next start finds it; so is the one of a GGUF file, by us.
    """
    if is_gguf(folder):  # imported only then: numpy has threads, and who forks may have none
        from quintet.deploy.config.gguf.tokenizer import tokenizer_of_gguf
        from quintet.executor.checkpoints.gguf.parts import read_parts

        return tokenizer_of_gguf(read_parts(folder), cache or _default_cache())
    if (folder / "tokenizer.json").is_file():
        return folder
    slow = next((name for name in _SLOW_FILES if (folder / name).is_file()), None)
    if slow is None:
        raise ConfigError(f"{folder} has no tokenizer.json: {way_out}")
    source = folder / slow
    stat = source.stat()
    key = hashlib.sha256(f"{source}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    target = (cache or _default_cache()) / key
    if (target / "tokenizer.json").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    converted = subprocess.run(
        [sys.executable, "-c", _CONVERT, str(folder), str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if converted.returncode != 0 or not (target / "tokenizer.json").is_file():
        last = (converted.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(
            f"{folder} has only {slow}, and transformers could not convert it to tokenizer.json (sentencepiece may need"
            f" `pip install sentencepiece`): {last}. Else {way_out}"
        )
    return target


def _default_cache() -> Path:
    return user_cache() / "tokenizers"
