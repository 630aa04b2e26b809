"""Output path of a quantized model, written atomically."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintet.deploy.config.memory import format_size
from quintet.wire.errors import ConfigError


def check_target(out: Path, overwrite: bool) -> None:
    """Reject an existing target without ``overwrite``, and any target that is not a model. Raises `ConfigError`."""
    if not out.parent.is_dir():
        raise ConfigError(f"OUT {str(out)!r}: the folder {out.parent} does not exist")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"OUT {str(out)!r}: {out.parent} is not writable")
    if not out.exists():
        return
    if out.is_dir() and not (out / "config.json").is_file():
        raise ConfigError(
            f"OUT {str(out)!r} is a folder without config.json, so it is not overwritten: choose another path"
        )
    if out.is_dir() == (out.suffix == ".gguf"):
        kind = "a folder" if out.is_dir() else "a file"
        raise ConfigError(f"OUT {str(out)!r} is {kind}, so it is not overwritten: choose another path")
    if not overwrite:
        raise ConfigError(f"OUT {str(out)!r} already exists: choose another path, or set --overwrite")


def check_apart(out: Path, source: Path) -> None:
    """Reject a target that is or contains the source model, which overwriting would delete. Raises `ConfigError`."""
    if source.resolve().is_relative_to(out.resolve()):
        raise ConfigError(
            f"MODEL {str(source)!r} is OUT {str(out)!r}, or inside it: choose another path for OUT"
        )


def check_space(out: Path, num_bytes: int) -> None:
    """Reject a target on a file system with too little free space. Raises `ConfigError`."""
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise ConfigError(
            f"OUT {str(out)!r} needs {format_size(num_bytes)}, but {format_size(free)} is free: free space, or choose another"
            " path"
        )


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``out``; on success, rename it to ``out``."""
    try:
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=".quantizing-"))
    except OSError as error:
        raise ConfigError(f"OUT {str(out)!r}: {error.strerror or error}") from None
    made, replaced = temporary / "new" / out.name, temporary / "replaced"
    made.parent.mkdir()
    try:
        yield made
        if made.is_dir() and out.exists():
            os.rename(out, replaced)  # os.replace cannot replace a non-empty folder
        os.replace(made, out)
    except OSError as error:
        raise ConfigError(f"OUT {str(out)!r}: {error.strerror or error}") from None
    finally:
        if replaced.exists() and not out.exists():
            os.rename(replaced, out)
        shutil.rmtree(temporary, ignore_errors=True)
