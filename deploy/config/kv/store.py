"""Configuration of the shared KV store (``--kv-store``)."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from quintet.deploy.config.kv.transfer import KvSource, check_folder
from quintet.executor.kv_transfer.store.connector import FSSPEC, connector_path, known_schemes
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError

FLAG = "--kv-store"
DEFAULT_SIZE = "8GiB"
MAX_WAITING_BYTES = 256 << 20
"""Limit of host memory for copies of blocks that are queued for writing."""
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def kv_store_config(source: KvSource) -> KvStoreConfig | None:
    """Return the section, or None without ``--kv-store``. Raises `ConfigError`."""
    options, url = source.options, source.options.kv_store
    if url is None:
        return None
    source.check(FLAG)
    _check_url(url)
    size_bytes = 0
    if url.startswith("file:"):
        size_bytes = source.size_bytes(options.kv_store_size or DEFAULT_SIZE, "--kv-store-size")
    elif options.kv_store_size is not None:
        raise ConfigError(
            f"--kv-store-size is for file: stores; for {url}, drop it and use lifecycle rules of the storage"
        )
    return KvStoreConfig(
        url=url,
        size_bytes=size_bytes,
        waiting_bytes=MAX_WAITING_BYTES,
        staging_bytes=source.staging_bytes,
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
        folder = Path(url.removeprefix("file://"))
        if not folder.is_absolute():
            raise ConfigError(f"{FLAG} {url}: write an absolute path, file:///…")
        check_folder(folder, f"{FLAG} {url}")
    elif connector_path(url) == FSSPEC:
        _check_fsspec(url, scheme)


def _without_secrets(url: str) -> str:
    return re.sub(r"//[^/]*@", "//…@", url)


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
