"""A model on several hosts: valid layouts, and rejections with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.deploy.cli import headless
from quintet.deploy.cli.plan import make_plan, plan_lines
from quintet.deploy.config import build
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import hosts_config
from quintet.deploy.supervisor.admin_server import CommandError, check_memory
from quintet.executor.distributed.hosts.topology import links_between, ranks_of, receiver_host, sender_host
from quintet.wire.config import ExecutorConfig, HostsConfig
from quintet.wire.errors import ConfigError


def options_of(folder: Path, **changed: object) -> Options:
    key = folder / "key"
    key.write_bytes(b"k" * 32)
    requested: dict[str, object] = {
        "device": "cpu", "load_format": "dummy", "nnodes": 2, "pipeline_parallel_size": 2, "group_key": str(key),
    }  # fmt: skip
    return Options(**(requested | changed))  # type: ignore[arg-type]


def test_hosts_have_as_many_stages_each(tmp_path: Path) -> None:
    config = resolve(options_of(tmp_path, master_addr="10.0.0.5", master_port=7), tmp_path).config
    assert config.executor.hosts == HostsConfig(count=2, address="10.0.0.5:7", key_file=str(tmp_path / "key"))
    assert (config.executor.num_ranks, config.executor.ranks_per_host) == (2, 1)
    assert resolve(Options(device="cpu", load_format="dummy"), tmp_path).config.executor.hosts is None


def test_ranks_of_the_only_stage_are_divided_over_hosts(tmp_path: Path) -> None:
    requested = options_of(tmp_path, nnodes=2, pipeline_parallel_size=1, tensor_parallel_size=4)
    resolution = resolve(requested, tmp_path)
    assert any("executor ×1 of 4 ranks on 2 hosts" in line for line in plan_lines(make_plan(resolution)))
    executor = resolution.config.executor
    assert [list(ranks_of(executor, host)) for host in (0, 1)] == [[0, 1], [2, 3]]
    assert [
        (sender_host(executor, link), receiver_host(executor, link)) for link in links_between(executor)
    ] == [(0, 1)]


def test_default_kv_memory_is_the_same_on_all_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_ram_bytes", lambda: 1 << 30)
    requested = {
        "max_model_len": 256,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_share": 0.015,
    }
    alone = resolve(options_of(tmp_path, nnodes=1, group_key=None, **requested), tmp_path).config.cache
    together = resolve(options_of(tmp_path, **requested), tmp_path).config.cache
    assert 2 * alone.memory_bytes < together.memory_bytes < 2.5 * alone.memory_bytes, (
        "each host has half of the weights"
    )


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ({"group_key": None}, "set --group-key FILE"),
        ({"group_key": "/nowhere/key"}, "--group-key /nowhere/key: No such file"),
        ({"pipeline_parallel_size": 3}, "valid sizes: 2, 4, 6"),
        (
            {"pipeline_parallel_size": 1},
            "--tensor-parallel-size 1: ranks must divide evenly among hosts; valid sizes: 2, 4, 6",
        ),
        (
            {"pipeline_parallel_size": 3, "tensor_parallel_size": 2},
            "valid sizes: 2, 4, 6, …, or 1 with ranks",
        ),
        (
            {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "enable_expert_parallel": True},
            "--enable-expert-parallel with --nnodes 2 and one stage: ranks exchange expert rows",
        ),
        (
            {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "--decode-context-parallel-size with --nnodes 2 and one stage: ranks read each other's KV",
        ),
        (
            {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "device": "cuda"},
            "--nnodes is supported on CPUs only",
        ),
        ({"data_parallel_size": 2}, "only one engine can span hosts"),
        ({"node_rank": 2, "headless": True}, "must be from 0 to 1"),
        ({"node_rank": 1}, "add --headless"),
        ({"headless": True}, "--headless with --node-rank 0"),
        ({"node_rank": 1, "headless": True}, "--headless is supported by quintet serve only"),
        ({"nnodes": 1}, "--group-key requires several hosts"),
        ({"nnodes": 1, "group_key": None, "node_rank": 1}, "--node-rank requires several hosts"),
        ({"master_addr": "0.0.0.0"}, "wildcard address"),
        ({"master_addr": "tcp://10.0.0.5"}, "write a name or an address"),
        ({"master_port": 70_000}, "must be from 1 to 65535"),
        ({"executor": "mock"}, "the mock executor does not support ranks"),
    ],
)
def test_invalid_flags_are_rejected(requested: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(options_of(tmp_path, **requested), tmp_path)


def test_other_hosts_load_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revisions = list[str | None]()

    def locate(name: str, with_weights: bool, with_code: bool, revision: str | None = None) -> Path:
        revisions.append(revision)
        return tmp_path

    monkeypatch.setattr(headless, "locate_model", locate)
    headless.located(options_of(tmp_path, model="owner/name", revision="v1"))
    assert revisions == ["v1"]


def test_addresses_are_normalized(tmp_path: Path) -> None:
    for given, address in (
        ("::1", "[::1]:29501"),
        ("[::1]", "[::1]:29501"),
        ("leader-0.group", "leader-0.group:29501"),
    ):
        hosts = hosts_config(options_of(tmp_path, master_addr=given))
        assert hosts is not None and hosts.address == address


def test_ranks_of_each_host() -> None:
    hosts = HostsConfig(count=2, address="", key_file="")
    executor = ExecutorConfig(tensor_parallel_size=2, pipeline_parallel_size=4, hosts=hosts)
    assert [*ranks_of(executor, 0), *ranks_of(executor, 1)] == list(range(8))
    assert links_between(executor) == [1, 3]
    assert [(sender_host(executor, link), receiver_host(executor, link)) for link in (1, 3)] == [
        (0, 1),
        (1, 0),
    ]


def test_no_engine_is_added_to_one_on_several_hosts(tmp_path: Path) -> None:
    config = resolve(options_of(tmp_path), tmp_path).config
    with pytest.raises(CommandError, match="start another group of hosts"):
        check_memory(config, 1, 1 << 50)
