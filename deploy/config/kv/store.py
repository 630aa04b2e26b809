"""Configuration of the shared KV store (``--kv-store``)."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from quintet.deploy.config.flags import Options
from quintet.deploy.config.kv.export import check_kv_leaves, num_parts
from quintet.deploy.config.memory import format_size, parse_size
from quintet.executor.kv_transfer.store.connector import FSSPEC, connector_path, known_schemes
from quintet.process.own_files import ownership_error
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec

FLAG = "--kv-store"
DEFAULT_SIZE = "8GiB"
MAX_STAGING_BYTES = 512 << 20
"""Limit of host memory for KV fetched for waiting requests."""
MAX_WAITING_BYTES = 256 << 20
"""Limit of host memory for copies of blocks that are queued for writing."""
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def kv_store_config(
    options: Options,
    device: str,
    kv: KvSpec,
    max_model_len: int,
    step_tokens: int,
    *,
    has_prefix_cache: bool,
) -> KvStoreConfig | None:
    """Return the section, or None without ``--kv-store``. Raises `ConfigError`."""
    url = options.kv_store
    if url is None:
        if options.kv_store_size is not None:
            raise ConfigError(f"--kv-store-size requires {FLAG}: set {FLAG}, or drop --kv-store-size")
        return None
    check_kv_leaves(FLAG, options, device, has_prefix_cache)
    _check_url(url)
    parts, request_bytes = num_parts(options), kv.most_blocks(max_model_len, step_tokens) * kv.bytes_per_block
    return KvStoreConfig(
        url=url,
        size_bytes=_size_bytes(options, url, request_bytes * parts, max_model_len),
        waiting_bytes=MAX_WAITING_BYTES,
        staging_bytes=max(kv.bytes_per_block, min(MAX_STAGING_BYTES // parts, request_bytes)),
    )


def _check_url(url: str) -> None:
    scheme, separator, rest = url.partition("://")
    if not separator or not rest.strip("/") or not SCHEME.fullmatch(scheme):
        raise ConfigError(
            f"{FLAG} {_without_secrets(url)}: write a URL such as file:///dev/shm/quintet or s3://bucket/prefix"
        )
    if "@" in urlsplit(url).netloc:
        raise ConfigError(
            f"{FLAG} {_without_secrets(url)}: the URL contains credentials, which process lists and logs would show: set them in"
            " the environment, or in the configuration files of the storage's package"
        )
    if scheme == "file":
        _check_folder(url)
    elif connector_path(url) == FSSPEC:
        _check_fsspec(url, scheme)


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^/]*@", "//…@", url)


def _check_folder(url: str) -> None:
    folder = Path(url.removeprefix("file://"))
    if not folder.is_absolute():
        raise ConfigError(f"{FLAG} {url}: write an absolute path, file:///…")
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise ConfigError(f"{FLAG} {url}: {error.filename} cannot be accessed ({error.strerror})") from None
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{FLAG} {url}: {existing} must be a writable folder")
    complaint = ownership_error(folder.stat()) if existing == folder else None
    if complaint is not None:
        raise ConfigError(f"{FLAG} {url}: {folder} {complaint}")


def _check_fsspec(url: str, scheme: str) -> None:
    if find_spec("fsspec") is None:
        raise ConfigError(f"{FLAG} {url}: {scheme} requires fsspec: pip install 'quintet[store]'")
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{FLAG} {url}: {error}. Available without a package for {scheme}: {', '.join(known_schemes())}, and the built-in"
            " schemes of fsspec"
        ) from None


def _size_bytes(options: Options, url: str, request_bytes: int, max_model_len: int) -> int:
    if not url.startswith("file:"):
        if options.kv_store_size is not None:
            raise ConfigError(
                f"--kv-store-size is for file: stores; for {url}, drop it and use lifecycle rules of the storage"
            )
        return 0
    size_bytes = parse_size(options.kv_store_size or DEFAULT_SIZE, "--kv-store-size")
    if size_bytes < request_bytes:
        raise ConfigError(
            f"--kv-store-size is {format_size(size_bytes)}, but one request of {max_model_len} tokens needs"
            f" {format_size(request_bytes)}: raise it, or lower --max-model-len"
        )
    return size_bytes
