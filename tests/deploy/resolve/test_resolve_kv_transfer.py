"""``--kv-transfer-config``: its keys have the meaning of the flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet.deploy.config.build import Resolution, resolve
from quintet.deploy.config.flags import Options
from quintet.wire.config import CacheConfig
from quintet.wire.errors import ConfigError


def resolved(folder: Path, transfer: dict[str, Any], **options: object) -> Resolution:
    requested: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "kv_transfer_config": transfer}
    return resolve(Options(**(requested | options)), folder, http=False)


def cache_of(folder: Path, transfer: dict[str, Any], **options: object) -> CacheConfig:
    return resolved(folder, transfer, **options).config.cache


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_sections_equal_flags(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    sections = {
        "host": {"size": "256MiB"},
        "disk": {"folder": str(tmp_path / "kv"), "size": "1GiB"},
        "peers": {
            "role": "both",
            "listen": "127.0.0.1:7000",
            "hosts": ["10.0.0.0/24"],
            "key_file": str(key),
            "memory": "2GiB",
        },
        "store": {"url": f"file://{tmp_path}/store", "size": "3GiB"},
    }
    flags = {
        "swap_space": 0.25,
        "kv_disk": str(tmp_path / "kv"),
        "kv_disk_size": "1GiB",
        "role": "both",
        "kv_peer_listen": "127.0.0.1:7000",
        "kv_peers": ["10.0.0.0/24"],
        "kv_peer_key": str(key),
        "kv_peer_memory": "2GiB",
        "kv_store": f"file://{tmp_path}/store",
        "kv_store_size": "3GiB",
    }
    cache = cache_of(tmp_path, sections)
    assert cache == cache_of(tmp_path, {}, **flags)
    assert cache.swap_bytes == 256 << 20 and cache.disk and cache.peers and cache.store


@pytest.mark.parametrize(
    ("kv_role", "role"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")]
)
def test_roles_of_vllm_are_accepted(tmp_path: Path, kv_role: str, role: str) -> None:
    peers = cache_of(tmp_path, {"kv_connector": "NixlConnector", "kv_role": kv_role}).peers
    assert peers is not None and peers.role == role


def test_further_keys_of_vllm_are_noted(tmp_path: Path) -> None:
    """As in the guides of llm-d and of vLLM."""
    keys = {"kv_load_failure_policy": "fail", "kv_buffer_size": "1e9", "kv_connector_extra_config": {"a": 1}}
    found = resolved(tmp_path, {"kv_connector": "NixlConnector", "kv_role": "kv_both"} | keys)
    assert found.config.cache.peers is not None and found.config.cache.peers.role == "both"
    [note] = [note for note in found.notes if note.startswith("--kv-transfer-config")]
    assert note.endswith("without effect: kv_buffer_size, kv_connector_extra_config, kv_load_failure_policy")


def test_offloading_of_vllm_is_host_memory(tmp_path: Path) -> None:
    extra = {"cpu_bytes_to_use": 64 << 20, "eviction_policy": "lru"}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    found = resolved(tmp_path, transfer)
    assert found.config.cache == cache_of(tmp_path, {"host": {"size": "64MiB"}})
    assert not [note for note in found.notes if note.startswith("--kv-transfer-config")]


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        ({"tape": {}}, "unknown back end 'tape'; write host, disk, peers, store"),
        ({"disk": {"path": "/kv"}}, "unknown key 'path' of disk; write folder, size"),
        ({"disk": "/kv"}, "--kv-transfer-config disk is '/kv', which is not JSON"),
        ({"host": {"size": "much"}}, "--kv-transfer-config host size is 'much'"),
        ({"peers": {"role": "all"}}, "--kv-transfer-config: Invalid enum value 'all'"),
        ({"disk": {"size": "1GiB"}}, "--kv-disk-size requires --kv-disk"),
        ({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, "or sections of back ends: host"),
        ({"kv_connector": "NixlConnector"}, "kv_connector 'NixlConnector' is not supported; write"),
        (
            {"kv_connector": "OffloadingConnector"},
            "kv_connector 'OffloadingConnector' is not supported; write",
        ),
        ({"kv_port": 1}, "unknown back end 'kv_port'"),
        (
            {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "secondary_tiers": [{}]},
            },
            "secondary_tiers is not supported: write the sections host and disk",
        ),
    ],
)
def test_invalid_sections_are_rejected(tmp_path: Path, transfer: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cache_of(tmp_path, transfer)
    assert words in str(refused.value)


def test_section_and_flag_conflict(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config and --kv-disk are both set"):
        cache_of(tmp_path, {"disk": {"folder": "/kv"}}, kv_disk="/kv")
