"""Whether KV is kept on disk (``--kv-disk``), where, and how much."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from quintet.deploy.config.flags import Options
from quintet.deploy.config.kv_export import check_kv_leaves, num_parts
from quintet.deploy.config.memory import format_size, parse_size
from quintet.process.own_files import complaint_about
from quintet.wire.config import KvDiskConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec

FLAG = "--kv-disk"
DEFAULT_SIZE = "8GiB"
MAX_STAGING_BYTES = 512 << 20
"""What is read at once, of all waiting requests, lies in memory."""


def kv_disk_config(
    options: Options,
    device: str,
    kv: KvSpec,
    max_model_len: int,
    step_tokens: int,
    *,
    shares_beginnings: bool,
) -> KvDiskConfig | None:
    """Return the section, or None; reject what cannot be. shares_beginnings: whether there is a prefix cache."""
    if options.kv_disk is None:
        if options.kv_disk_size is not None:
            raise ConfigError(
                f"--kv-disk-size {options.kv_disk_size} says how much, not where: give {FLAG} too"
            )
        return None
    check_kv_leaves(FLAG, options, device, shares_beginnings)
    folder = Path(options.kv_disk).expanduser().absolute()
    _check_folder(folder)
    parts, size_bytes = num_parts(options), parse_size(options.kv_disk_size or DEFAULT_SIZE, "--kv-disk-size")
    num_needed = kv.most_blocks(max_model_len, step_tokens)
    if kv.num_blocks(size_bytes // parts) < num_needed:
        least = format_size(num_needed * kv.bytes_per_block * parts)
        raise ConfigError(
            f"--kv-disk-size is {format_size(size_bytes)}, and one request of {max_model_len} tokens takes {least}: give as much,"
            " or lower --max-model-len"
        )
    staging_bytes = max(kv.bytes_per_block, min(MAX_STAGING_BYTES // parts, num_needed * kv.bytes_per_block))
    return KvDiskConfig(folder=str(folder), size_bytes=size_bytes // parts, staging_bytes=staging_bytes)


def free_bytes(folder: Path) -> int:
    """Return what is free where the folder is, or would be. Raises `ConfigError`."""
    there = _nearest(folder)
    try:
        return shutil.disk_usage(there).free
    except OSError as error:
        raise _closed(folder, error) from None


def _nearest(folder: Path) -> Path:
    """Return the folder, or what is there of those that it would be in."""
    try:
        return next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise _closed(folder, error) from None


def _closed(folder: Path, error: OSError) -> ConfigError:
    words = f"{error.filename} may not be entered ({error.strerror}): give a folder that the server may write"
    return ConfigError(f"{FLAG} {folder}: {words}")


def _check_folder(folder: Path) -> None:
    there = _nearest(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{FLAG} {folder}: {there} must be a folder that the server may write")
    complaint = complaint_about(there.stat()) if there == folder else None
    if complaint is not None:
        raise ConfigError(f"{FLAG} {folder}: {complaint}")
