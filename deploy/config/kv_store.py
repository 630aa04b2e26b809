"""Whether servers share a store of KV (``--kv-store``), and which."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from quintet.deploy.config.flags import Options
from quintet.deploy.config.kv_export import check_kv_leaves, num_parts
from quintet.deploy.config.memory import format_size, parse_size
from quintet.executor.kv_transfer.store.connector import FSSPEC, connector_path, known_schemes
from quintet.process.own_files import complaint_about
from quintet.wire.config import KvStoreConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec

FLAG = "--kv-store"
DEFAULT_SIZE = "8GiB"
MAX_STAGING_BYTES = 512 << 20
"""What is fetched at once, of all waiting requests, lies in memory."""
MAX_WAITING_BYTES = 256 << 20
"""So do copies of what is to be kept."""
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def kv_store_config(
    options: Options,
    device: str,
    kv: KvSpec,
    max_model_len: int,
    step_tokens: int,
    *,
    shares_beginnings: bool,
) -> KvStoreConfig | None:
    """Return the section, or None; reject what cannot be. shares_beginnings: whether there is a prefix cache."""
    url = options.kv_store
    if url is None:
        if options.kv_store_size is not None:
            raise ConfigError(
                f"--kv-store-size {options.kv_store_size} says how much, not where: give {FLAG} too"
            )
        return None
    check_kv_leaves(FLAG, options, device, shares_beginnings)
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
            f"{FLAG} {_without_secrets(url)}: a URL is shown to whoever looks at processes and logs, and this one has somebody's"
            " name in it: give credentials in the environment, or in the files that the storage's package reads"
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
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise ConfigError(f"{FLAG} {url}: {error.filename} may not be entered ({error.strerror})") from None
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{FLAG} {url}: {there} must be a folder that the server may write")
    complaint = complaint_about(folder.stat()) if there == folder else None
    if complaint is not None:
        raise ConfigError(f"{FLAG} {url}: {folder} {complaint}")


def _check_fsspec(url: str, scheme: str) -> None:
    if find_spec("fsspec") is None:
        raise ConfigError(f"{FLAG} {url}: {scheme} is reached by fsspec: pip install 'quintet[store]'")
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{FLAG} {url}: {error}. Without a package for {scheme} there are {', '.join(known_schemes())}, and what fsspec has"
            " of its own"
        ) from None


def _size_bytes(options: Options, url: str, request_bytes: int, max_model_len: int) -> int:
    if not url.startswith("file:"):
        if options.kv_store_size is not None:
            raise ConfigError(
                f"--kv-store-size is for file: stores; how much {url} keeps, and how long, is its owner's to say, by lifecycle"
                " rules of the storage: drop it"
            )
        return 0
    size_bytes = parse_size(options.kv_store_size or DEFAULT_SIZE, "--kv-store-size")
    if size_bytes < request_bytes:
        raise ConfigError(
            f"--kv-store-size is {format_size(size_bytes)}, and one request of {max_model_len} tokens takes"
            f" {format_size(request_bytes)}: give as much, or lower --max-model-len"
        )
    return size_bytes
