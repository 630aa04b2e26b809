"""KV on disk and KV events: valid flags, and rejections with a fix."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.config.model_folder import write_model

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.kv.storage import free_bytes
from quintet.deploy.supervisor.run_dirs import lock_stores
from quintet.deploy.tools.plan_parts import disk_plan
from quintet.process import own_files
from quintet.wire.config import EngineConfig, KvDiskConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_events import KvEventsConfig

MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 4,
    "intermediate_size": 128,
}


def config_of(folder: Path, **options: object) -> EngineConfig:
    requested: dict[str, object] = {"device": "cpu", "load_format": "dummy", "kv_disk": str(folder / "kv")}
    return resolve(Options(**(requested | options)), folder, http=False).config  # type: ignore[arg-type]


def test_no_disk_tier_by_default(tmp_path: Path) -> None:
    assert config_of(tmp_path, kv_disk=None).cache.disk is None


def test_sizes_are_of_each_engine(tmp_path: Path) -> None:
    config = config_of(tmp_path, kv_disk_size="1GiB", data_parallel_size=2)
    kv = config.model.kv
    staging_bytes = kv.bytes_per_block * config.model.max_model_len // kv.block_size
    assert config.cache.disk == KvDiskConfig(
        folder=str(tmp_path / "kv"), size_bytes=1 << 30, staging_bytes=staging_bytes
    )
    assert not (tmp_path / "kv").exists(), "a plan creates no folder"


@pytest.mark.parametrize("size", [1, 2])
def test_sizes_are_of_all_ranks_together(tmp_path: Path, size: int) -> None:
    config = config_of(
        tmp_path, kv_disk_size="1GiB", tensor_parallel_size=size, decode_context_parallel_size=1
    )
    plan = disk_plan(config)
    assert plan is not None and plan.size_bytes == 1 << 30
    assert plan.num_blocks == (1 << 30) // size // config.model.kv.bytes_per_block
    with pytest.raises(ConfigError, match=r"--kv-disk-size is .* needs 4.0 MiB"):
        config_of(tmp_path, kv_disk_size="3MiB", tensor_parallel_size=size)


def test_blocks_on_several_hosts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    hosts = {"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "127.0.0.1"}
    with pytest.raises(ConfigError, match="not supported with several hosts"):
        config_of(tmp_path, group_key=str(tmp_path / "key"), **hosts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_disk": None, "kv_disk_size": "1GiB"}, "--kv-disk-size requires --kv-disk"),
        ({"executor": "mock"}, "mock executor has no KV cache"),
        ({"enable_prefix_caching": False}, "requires prefix caching, which is disabled"),
        ({"kv_disk": "/dev/null"}, "/dev/null must be a writable folder"),
        ({"kv_disk_size": "1MiB"}, "one request of 2048 tokens needs 4.0 MiB"),
        ({"kv_disk_size": "much"}, "--kv-disk-size is 'much'; write a size"),
    ],
)
def test_invalid_flags_are_rejected(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, **options)
    assert words in str(refused.value)


ANOTHER_SERVER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
EVENTS = '{"enable_kv_cache_events": true, "topic": "kv@"%s}'


def test_inaccessible_folder_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def is_closed(path: Path) -> bool:
        if path == tmp_path / "kv":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", is_closed)
    with pytest.raises(ConfigError, match=r"--kv-disk .* cannot be accessed"):
        config_of(tmp_path)


def test_folder_that_becomes_inaccessible_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_closed(path: Path) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("shutil.disk_usage", is_closed)
    with pytest.raises(ConfigError, match=r"--kv-disk .* cannot be accessed"):
        free_bytes(tmp_path / "kv")


def test_folder_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir()
    monkeypatch.setattr(own_files, "ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"--kv-disk .* belongs to user"):
        config_of(tmp_path)


def test_models_with_states_only_have_no_events(tmp_path: Path) -> None:
    model = write_model(tmp_path, **MAMBA)
    with pytest.raises(ConfigError, match="this model has only recurrent states"):
        config_of(tmp_path, model=str(model), kv_disk=None, kv_events_config=EVENTS % "")


def test_too_few_event_ports_are_rejected(tmp_path: Path) -> None:
    requested = EVENTS % ', "endpoint": "tcp://*:65534"'
    assert config_of(tmp_path, kv_disk=None, kv_events_config=requested, data_parallel_size=2).cache.events
    with pytest.raises(ConfigError, match="the 3 engines use consecutive ports"):
        config_of(tmp_path, kv_disk=None, kv_events_config=requested, data_parallel_size=3)


def test_events_are_configured_by_flag(tmp_path: Path) -> None:
    assert config_of(tmp_path, kv_events_config=EVENTS % "").cache.events == KvEventsConfig(topic="kv@")
    for off in ("{}", '{"enable_kv_cache_events": false}', EVENTS % ', "publisher": "null"'):
        assert config_of(tmp_path, kv_events_config=off).cache.events is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("yes", "write JSON such as"),
        (EVENTS % ', "endpiont": ""', "unknown field `endpiont`"),
        (EVENTS % ', "endpoint": "5557"', "endpoint is '5557'; write tcp://HOST:PORT"),
        (EVENTS % ', "endpoint": "tcp://*:77777"', "the port must be from 1 to 65535"),
        (EVENTS % ', "replay_endpoint": "tcp://localhost"', "the port must be from 1 to 65535"),
        (EVENTS % ', "publisher": "kafka"', "publisher is 'kafka'; it must be zmq or null"),
        (EVENTS % ', "buffer_steps": 0', "buffer_steps is 0; it must be from 1"),
    ],
)
def test_invalid_event_settings_are_rejected(tmp_path: Path, config: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, kv_events_config=config)
    assert words in str(refused.value)


def test_folder_is_locked_by_one_server(tmp_path: Path) -> None:
    config, lock = config_of(tmp_path), tmp_path / "kv" / "server.lock"
    with lock_stores(config):
        assert lock.exists()
    command = [sys.executable, "-c", ANOTHER_SERVER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as another:
        assert another.stdin is not None and another.stdout is not None
        assert another.stdout.readline()
        with (
            pytest.raises(ConfigError, match=r"--kv-disk .* is in use by another running server"),
            lock_stores(config),
        ):
            pass
        another.stdin.close()
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ConfigError, match=r"--kv-disk .* cannot be opened"), lock_stores(config):
        pass
