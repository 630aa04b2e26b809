"""Configuration of the disk KV cache (``--kv-disk``) and of the shared KV store (``--kv-store``)."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from quintet.deploy.config.kv.transfer import KvSource, check_folder, inaccessible, nearest_folder
from quintet.executor.kv_transfer.store.connector import FSSPEC, connector_path, known_schemes
from quintet.wire.config import KvDiskConfig, KvStoreConfig
from quintet.wire.errors import ConfigError

DISK_FLAG, STORE_FLAG = "--kv-disk", "--kv-store"
DEFAULT_SIZE = "8GiB"
MAX_WAITING_BYTES = 256 << 20
"""Limit of host memory for copies of blocks that are queued for writing."""
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def kv_disk_config(source: KvSource) -> KvDiskConfig | None:
    """Return the section, or None without ``--kv-disk``. Raises `ConfigError`."""
    options = source.options
    if options.kv_disk is None:
        return None
    source.check(DISK_FLAG)
    folder = Path(options.kv_disk).expanduser().absolute()
    check_folder(folder, f"{DISK_FLAG} {folder}")
    size_bytes = source.size_bytes(options.kv_disk_size or DEFAULT_SIZE, "--kv-disk-size")
    return KvDiskConfig(
        folder=str(folder), size_bytes=size_bytes // source.parts, staging_bytes=source.staging_bytes
    )


def free_bytes(folder: Path) -> int:
    """Return the free disk space of a folder that may not exist yet, in bytes. Raises `ConfigError`."""
    existing = nearest_folder(folder, f"{DISK_FLAG} {folder}")
    try:
        return shutil.disk_usage(existing).free
    except OSError as error:
        raise inaccessible(f"{DISK_FLAG} {folder}", error) from None


def kv_store_config(source: KvSource) -> KvStoreConfig | None:
    """Return the section, or None without ``--kv-store``. Raises `ConfigError`."""
    options, url = source.options, source.options.kv_store
    if url is None:
        return None
    source.check(STORE_FLAG)
    _check_url(url)
    size_bytes = 0
    if url.startswith("file:"):
        size_bytes = source.size_bytes(options.kv_store_size or DEFAULT_SIZE, "--kv-store-size")
    elif options.kv_store_size is not None:
        raise ConfigError(
            f"--kv-store-size is for file: stores; for {url}, drop it and use lifecycle rules of the storage"
        )
    return KvStoreConfig(
        url=url, size_bytes=size_bytes, waiting_bytes=MAX_WAITING_BYTES, staging_bytes=source.staging_bytes
    )


def _check_url(url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if not separator or not rest.strip("/") or not SCHEME.fullmatch(scheme):
        raise ConfigError(
            f"{STORE_FLAG} {_without_secrets(url)}: write a URL such as file:///dev/shm/quintet or s3://bucket/prefix"
        )
    if "@" in urlsplit(url).netloc:
        raise ConfigError(
            f"{STORE_FLAG} {_without_secrets(url)}: the URL contains credentials, which process lists and logs would show: set"
            " them in the environment, or in the configuration files of the storage's package"
        )
    if scheme == "file":
        folder = Path(url.removeprefix("file://"))
        if not folder.is_absolute():
            raise ConfigError(f"{STORE_FLAG} {url}: write an absolute path, file:///…")
        check_folder(folder, f"{STORE_FLAG} {url}")
    elif connector_path(url) == FSSPEC:
        _check_fsspec(url, scheme)


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^/]*@", "//…@", url)


def _check_fsspec(url: str, scheme: str) -> None:
    if find_spec("fsspec") is None:
        raise ConfigError(f"{STORE_FLAG} {url}: {scheme} requires fsspec: pip install 'quintet[store]'")
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{STORE_FLAG} {url}: {error}. Available without a package for {scheme}: {', '.join(known_schemes())}, and the"
            " built-in schemes of fsspec"
        ) from None
