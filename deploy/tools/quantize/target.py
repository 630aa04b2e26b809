"""Where a quantized model is written: a file or folder that has its name only once it is whole."""

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
    """Reject a target that is there, unless it may be written anew, and what is no model's in any case. Raises `ConfigError`."""
    if not out.parent.is_dir():
        raise ConfigError(f"OUT {str(out)!r}: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"OUT {str(out)!r}: {out.parent} may not be written to")
    if not out.exists():
        return
    if out.is_dir() and not (out / "config.json").is_file():
        raise ConfigError(
            f"OUT {str(out)!r} is a folder without config.json, so no model's, and not overwritten: name another place"
        )
    if out.is_dir() == (out.suffix == ".gguf"):
        kind = "a folder" if out.is_dir() else "a file"
        raise ConfigError(f"OUT {str(out)!r} is {kind}, and not overwritten: name another place")
    if not overwrite:
        raise ConfigError(f"OUT {str(out)!r} is there already: name another place, or say --overwrite")


def check_apart(out: Path, source: Path) -> None:
    """Reject a target that is the model, or that the model lies in: who overwrites it loses the model. Raises `ConfigError`."""
    if source.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"MODEL {str(source)!r} is, or is in, OUT {str(out)!r}: name another place")


def check_space(out: Path, num_bytes: int) -> None:
    """Reject a target without room for it. Raises `ConfigError`."""
    free = shutil.disk_usage(out.parent).free
    if free < num_bytes:
        raise ConfigError(
            f"OUT {str(out)!r} takes {format_size(num_bytes)}, and there are {format_size(free)} free: make room, or name another"
            " place"
        )


@contextmanager
def in_place_of(out: Path) -> Iterator[Path]:
    """Give a path beside ``out`` to write a file or a folder at, which gets the name of ``out`` if all goes well."""
    try:
        making = Path(tempfile.mkdtemp(dir=out.parent, prefix=".quantizing-"))
    except OSError as error:
        raise ConfigError(f"OUT {str(out)!r}: {error.strerror or error}") from None
    made, former = making / "new" / out.name, making / "former"
    made.parent.mkdir()
    try:
        yield made
        if made.is_dir() and out.exists():
            os.rename(out, former)  # a folder that is not empty cannot be renamed over
        os.replace(made, out)
    except OSError as error:
        raise ConfigError(f"OUT {str(out)!r}: {error.strerror or error}") from None
    finally:
        if former.exists() and not out.exists():
            os.rename(former, out)
        shutil.rmtree(making, ignore_errors=True)
