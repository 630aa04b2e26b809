"""Location of ``tokenizer.json``; converts slow tokenizers once and caches the result."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from quintet.deploy.config.user_files import user_cache
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


SET_TOKENIZER = "set --tokenizer to a folder that has one"


def tokenizer_folder(folder: Path, cache: Path | None = None, advice: str = SET_TOKENIZER) -> Path:
    """Return a folder with ``tokenizer.json``. Raises `ConfigError` with ``advice`` at its end.

    transformers, in a subprocess, converts a slow tokenizer into ``cache`` (default: ``$XDG_CACHE_HOME/quintet/tokenizers``).
    The tokenizer of a GGUF file is converted by Quintet.
    """
    if is_gguf(folder):  # imported only here: numpy starts threads, after which the supervisor must not fork
        from quintet.deploy.config.gguf.tokenizer import tokenizer_of_gguf
        from quintet.executor.checkpoints.gguf.parts import read_parts

        return tokenizer_of_gguf(read_parts(folder), cache or _default_cache())
    if (folder / "tokenizer.json").is_file():
        return folder
    slow = next((name for name in _SLOW_FILES if (folder / name).is_file()), None)
    if slow is None:
        raise ConfigError(f"{folder} has no tokenizer.json: {advice}")
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
            f" `pip install sentencepiece`): {last}. Otherwise {advice}"
        )
    return target


def _default_cache() -> Path:
    return user_cache() / "tokenizers"
