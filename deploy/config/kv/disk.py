"""Configuration of the disk KV cache (``--kv-disk``)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from quintet.deploy.config.flags import Options
from quintet.deploy.config.kv.export import check_kv_leaves, num_parts
from quintet.deploy.config.memory import format_size, parse_size
from quintet.process.own_files import ownership_error
from quintet.wire.config import KvDiskConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec

FLAG = "--kv-disk"
DEFAULT_SIZE = "8GiB"
MAX_STAGING_BYTES = 512 << 20
"""Limit of host memory for KV read for waiting requests."""


def kv_disk_config(
    options: Options,
    device: str,
    kv: KvSpec,
    max_model_len: int,
    step_tokens: int,
    *,
    has_prefix_cache: bool,
) -> KvDiskConfig | None:
    """Return the section, or None without ``--kv-disk``. Raises `ConfigError`."""
    if options.kv_disk is None:
        if options.kv_disk_size is not None:
            raise ConfigError(f"--kv-disk-size requires {FLAG}: set {FLAG}, or drop --kv-disk-size")
        return None
    check_kv_leaves(FLAG, options, device, has_prefix_cache)
    folder = Path(options.kv_disk).expanduser().absolute()
    _check_folder(folder)
    parts, size_bytes = num_parts(options), parse_size(options.kv_disk_size or DEFAULT_SIZE, "--kv-disk-size")
    num_needed = kv.most_blocks(max_model_len, step_tokens)
    if kv.num_blocks(size_bytes // parts) < num_needed:
        least = format_size(num_needed * kv.bytes_per_block * parts)
        raise ConfigError(
            f"--kv-disk-size is {format_size(size_bytes)}, but one request of {max_model_len} tokens needs {least}: raise it, or"
            " lower --max-model-len"
        )
    staging_bytes = max(kv.bytes_per_block, min(MAX_STAGING_BYTES // parts, num_needed * kv.bytes_per_block))
    return KvDiskConfig(folder=str(folder), size_bytes=size_bytes // parts, staging_bytes=staging_bytes)


def free_bytes(folder: Path) -> int:
    """Return the free disk space of a folder that may not exist yet, in bytes. Raises `ConfigError`."""
    existing = _nearest(folder)
    try:
        return shutil.disk_usage(existing).free
    except OSError as error:
        raise _inaccessible(folder, error) from None


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    try:
        return next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise _inaccessible(folder, error) from None


def _inaccessible(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{FLAG} {folder}: {error.filename} cannot be accessed ({error.strerror}): choose a writable folder"
    )


def _check_folder(folder: Path) -> None:
    existing = _nearest(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{FLAG} {folder}: {existing} must be a writable folder")
    complaint = ownership_error(existing.stat()) if existing == folder else None
    if complaint is not None:
        raise ConfigError(f"{FLAG} {folder}: {complaint}")
