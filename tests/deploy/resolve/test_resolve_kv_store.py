"""Shared KV store: valid flags, and rejections with a fix."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.process import own_files
from quintet.wire.config import EngineConfig, KvStoreConfig
from quintet.wire.errors import ConfigError


def config_of(folder: Path, **options: object) -> EngineConfig:
    requested: dict[str, object] = {
        "device": "cpu",
        "load_format": "dummy",
        "kv_store": f"file://{folder}/kv",
    }
    return resolve(Options(**(requested | options)), folder, http=False).config  # type: ignore[arg-type]


def test_folder_is_bounded_and_not_created(tmp_path: Path) -> None:
    config = config_of(tmp_path, kv_store_size="1GiB")
    kv = config.model.kv
    staging_bytes = kv.bytes_per_block * config.model.max_model_len // kv.block_size
    assert config.cache.store == KvStoreConfig(
        url=f"file://{tmp_path}/kv",
        size_bytes=1 << 30,
        waiting_bytes=256 << 20,
        staging_bytes=staging_bytes,
    )
    assert not (tmp_path / "kv").exists(), "a plan creates no folder"
    assert config_of(tmp_path, kv_store=None).cache.store is None


def test_fsspec_store_has_no_size_limit(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = config_of(tmp_path, kv_store="memory://bucket/prefix").cache.store
    assert store is not None and store.size_bytes == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_store": None, "kv_store_size": "1GiB"}, "--kv-store-size requires --kv-store"),
        ({"executor": "mock"}, "mock executor has no KV cache"),
        ({"enable_prefix_caching": False}, "requires prefix caching, which is disabled"),
        ({"kv_store": "/dev/shm/kv"}, "write a URL such as file:///dev/shm/quintet"),
        ({"kv_store": "file://kv"}, "write an absolute path"),
        ({"kv_store": "file:///dev/null"}, "/dev/null must be a writable folder"),
        ({"kv_store_size": "1MiB"}, "one request of 2048 tokens needs 4.0 MiB"),
        ({"kv_store": "memory://kv", "kv_store_size": "1GiB"}, "lifecycle rules of the storage"),
        ({"kv_store": "absent://kv"}, "Available without a package for absent: file, lm, nixl+s3"),
    ],
)
def test_invalid_flags_are_rejected(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, **options)
    assert words in str(refused.value)


def test_url_with_a_secret_is_rejected_without_printing_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set them in the environment") as refused:
        config_of(tmp_path, kv_store="s3://me:hunter2@bucket/prefix")
    assert "hunter2" not in str(refused.value)


def test_missing_fsspec_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.deploy.config.kv.storage.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'quintet\[store\]'"):
        config_of(tmp_path, kv_store="s3://bucket/prefix")


def test_missing_storage_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match="s3fs"):
        config_of(tmp_path, kv_store="s3://bucket/prefix")


def test_folder_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir()
    monkeypatch.setattr(own_files, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"--kv-store .* belongs to user"):
        config_of(tmp_path)
