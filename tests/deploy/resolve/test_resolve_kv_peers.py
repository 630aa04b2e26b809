"""KV transfer between servers: valid flags, and rejections with a fix."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from quintet.deploy.cli.serve import check_peer_ports
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.kv.peers import THIS_MACHINE
from quintet.deploy.supervisor.listener import PortInUse
from quintet.wire.config import EngineConfig, KvPeersConfig
from quintet.wire.errors import ConfigError


def config_of(folder: Path, **options: object) -> EngineConfig:
    requested: dict[str, object] = {"device": "cpu", "load_format": "dummy", "role": "both"}
    return resolve(Options(**(requested | options)), folder, http=False).config  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quintet" / "kv-peer.key"


def key_in(folder: Path) -> str:
    path = folder / "key"
    path.write_bytes(b"k" * 32)
    return str(path)


def test_role_settings(tmp_path: Path, own_key: Path) -> None:
    assert config_of(tmp_path, role="none").cache.peers is None
    both = config_of(tmp_path)
    request_bytes = both.model.kv.bytes_per_block * both.model.max_model_len // both.model.kv.block_size
    whole = KvPeersConfig(
        role="both",
        listen="127.0.0.1:5600",
        allowed=THIS_MACHINE,
        key_file=str(own_key),
        offered_bytes=1 << 30,
        staging_bytes=request_bytes,
    )
    assert both.cache.peers == whole
    prefill = config_of(tmp_path, role="prefill", kv_peer_listen="tcp://[::1]:7", kv_peer_memory="2GiB")
    assert prefill.cache.peers == KvPeersConfig(
        role="prefill", listen="[::1]:7", key_file=str(own_key), offered_bytes=2 << 30
    )
    decode = config_of(
        tmp_path, role="decode", kv_peers=["10.0.0.0/24", "Prefill-0"], kv_peer_key=key_in(tmp_path)
    )
    assert decode.cache.peers == KvPeersConfig(
        role="decode",
        allowed=["10.0.0.0/24", "prefill-0"],
        key_file=str(tmp_path / "key"),
        staging_bytes=request_bytes,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"role": "none", "kv_peer_memory": "1GiB"},
            "--kv-peer-memory requires --role prefill, decode or both",
        ),
        ({"role": "decode", "kv_peer_listen": "127.0.0.1:7"}, "--role is decode"),
        ({"role": "prefill", "kv_peers": ["10.0.0.7"]}, "--role is prefill"),
        ({"executor": "mock"}, "mock executor has no KV cache"),
        ({"enable_prefix_caching": False}, "requires prefix caching, which is disabled"),
        ({"kv_peer_memory": "1MiB"}, "one request of 2048 tokens needs 4.0 MiB"),
        ({"kv_peer_listen": "5600"}, "write HOST:PORT"),
        (
            {"kv_peer_listen": "127.0.0.1:65535", "data_parallel_size": 2},
            "the port of every engine must be from 1",
        ),
        ({"kv_peer_listen": "*:5600"}, "* is not an IP address"),
        ({"kv_peer_listen": "0.0.0.0:5600"}, "0.0.0.0 is a wildcard address"),
        ({"kv_peer_listen": "10.0.0.5:5600"}, "set --kv-peer-key FILE too"),
        ({"kv_peers": ["10.0.0.7:5600"]}, "without port"),
        ({"kv_peers": ["127.0.0.1", "10.0.0.7"]}, "--kv-peers 10.0.0.7/32 is not this machine"),
        ({"role": "decode", "kv_peers": ["prefill-0"]}, "set --kv-peer-key FILE too"),
        ({"kv_peers": ["0.0.0.0/0"]}, "set --kv-peer-key FILE too"),
        ({"kv_peer_key": "/nowhere/key"}, "--kv-peer-key /nowhere/key: No such file"),
        ({"kv_peer_key": "/dev/null"}, "at least 32 random bytes"),
    ],
)
def test_invalid_flags_are_rejected(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, **options)
    assert words in str(refused.value)


def test_servers_of_a_user_share_a_key(tmp_path: Path, own_key: Path) -> None:
    def key_file() -> str:
        peers = config_of(tmp_path).cache.peers
        assert peers is not None
        return peers.key_file

    assert key_file() == str(own_key)
    content = own_key.read_bytes()
    assert len(content) == 32 and own_key.stat().st_mode & 0o777 == 0o600
    assert key_file() == str(own_key) and own_key.read_bytes() == content, "the next server uses the same key"
    assert [path.name for path in own_key.parent.iterdir()] == ["kv-peer.key"]

    own_key.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 600"):
        key_file()
    given = config_of(tmp_path, kv_peer_key=key_in(tmp_path)).cache.peers
    assert given is not None and given.key_file == str(tmp_path / "key")
    own_key.unlink()
    own_key.parent.rmdir()
    own_key.parent.touch()
    with pytest.raises(ConfigError, match="set --kv-peer-key FILE"):
        key_file()


def test_port_in_use_is_rejected_before_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(PortInUse, match="another with --kv-peer-listen"):
            check_peer_ports(config_of(tmp_path, kv_peer_listen=address))
    check_peer_ports(config_of(tmp_path, kv_peer_listen=address))
    check_peer_ports(config_of(tmp_path, role="none"))
