"""Configuration of the disk KV cache (``--kv-disk``)."""

from __future__ import annotations

import shutil
from pathlib import Path

from quintet.deploy.config.kv.transfer import KvSource, check_folder, inaccessible, nearest_folder
from quintet.wire.config import KvDiskConfig

FLAG = "--kv-disk"
DEFAULT_SIZE = "8GiB"


def kv_disk_config(source: KvSource) -> KvDiskConfig | None:
    """Return the section, or None without ``--kv-disk``. Raises `ConfigError`."""
    options = source.options
    if options.kv_disk is None:
        return None
    source.check(FLAG)
    folder = Path(options.kv_disk).expanduser().absolute()
    check_folder(folder, f"{FLAG} {folder}")
    size_bytes = source.size_bytes(options.kv_disk_size or DEFAULT_SIZE, "--kv-disk-size")
    return KvDiskConfig(
        folder=str(folder), size_bytes=size_bytes // source.parts, staging_bytes=source.staging_bytes
    )


def free_bytes(folder: Path) -> int:
    """Return the free disk space of a folder that may not exist yet, in bytes. Raises `ConfigError`."""
    existing = nearest_folder(folder, f"{FLAG} {folder}")
    try:
        return shutil.disk_usage(existing).free
    except OSError as error:
        raise inaccessible(f"{FLAG} {folder}", error) from None
