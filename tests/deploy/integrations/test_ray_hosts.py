"""Hosts placed by Ray, without Ray: rejected flags, resources of a host, and driver restarts.

With Ray: ``tests/clients/platforms/ray_hosts.py``.
"""

from __future__ import annotations

import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.processes.server import wait_until

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import of_first
from quintet.deploy.integrations.ray.cluster import Node, Order, processors_of
from quintet.deploy.integrations.ray.placement import PlacedHosts, flags_of_others, placed_hosts
from quintet.deploy.supervisor.startup_log import Failure
from quintet.wire.errors import EXIT_CONFIG, ConfigError


def options_of(**changed: object) -> Options:
    flags_given: dict[str, object] = {
        "device": "cpu", "load_format": "dummy", "nnodes": 2, "pipeline_parallel_size": 2,
        "distributed_executor_backend": "ray",
    }  # fmt: skip
    return Options(**(flags_given | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags_given", "words"),
    [
        ({"nnodes": 1}, "requires several hosts: set --nnodes"),
        ({"headless": True}, "--headless with --distributed-executor-backend ray: .*; drop --headless"),
        ({"node_rank": 1}, "--node-rank with --distributed-executor-backend ray: .*; drop --node-rank"),
        ({"group_key": "key"}, "--group-key with --distributed-executor-backend ray: .*; drop --group-key"),
        ({"executor": "mock"}, "the mock executor does not support ranks"),
        ({"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "device": "cuda"}, "supported on CPUs only"),
        ({"data_parallel_size": 2}, "start one group of hosts per engine"),
        ({"master_addr": "0.0.0.0"}, "wildcard address"),
    ],
)  # fmt: skip
def test_invalid_flags_are_rejected_before_ray_is_used(
    flags_given: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(of_first(options_of(**flags_given), tmp_path), tmp_path)


def test_resolving_without_serving_places_no_hosts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is supported by quintet serve only"):
        resolve(options_of(), tmp_path)


def test_each_run_has_a_key_readable_by_its_user_only(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        hosts = resolve(of_first(options_of(), tmp_path / name), tmp_path / name).config.executor.hosts
        assert hosts is not None
        assert stat.S_IMODE(Path(hosts.key_file).stat().st_mode) == 0o600
        keys.add(Path(hosts.key_file).read_bytes())
    assert [len(key) for key in keys] == [32, 32]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (None, "requires the package ray on every node: pip install"),
        ("ray://head:10001", "Ray clients are not supported"),
        ("127.0.0.1:1", "cannot connect to a Ray cluster .*Connection refused"),
    ],
)  # fmt: skip
def test_missing_ray_is_a_one_line_error(
    address: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is None:
        monkeypatch.setitem(sys.modules, "ray", None)
    else:
        monkeypatch.setitem(sys.modules, "ray", pytest)  # any importable module
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = resolve(of_first(options_of(), tmp_path), tmp_path).config
    with pytest.raises(ConfigError, match=words), placed_hosts(options_of(), config):
        pass


def test_other_hosts_receive_the_model_path_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    flags = flags_of_others(options_of(model="model", packed_cache="packed", api_key=["sk-secret"]))
    assert "sk-secret" not in str(flags)
    assert flags == {
        "nnodes": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 1, "master_port": 29501, "load_format": "dummy",
        "trust_remote_code": False, "log_level": "INFO", "model": str(tmp_path / "model"),
        "packed_cache": str(tmp_path / "packed"),
    }  # fmt: skip
    flags = flags_of_others(options_of(model="owner/name", revision="v1"))
    assert (flags["model"], flags["revision"]) == ("owner/name", "v1")


def cluster(*cpus: int) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", number) for i, number in enumerate(cpus)]


@pytest.mark.parametrize(
    ("cpus", "count", "ranks", "threads", "resources"),
    [
        ((8, 8), 2, 1, 0, [8, 8]),
        ((4, 64, 2, 32), 3, 1, 0, [4, 32, 32]),
        ((8, 8, 8), 2, 2, 3, [6, 6]),
        ((0, 8), 2, 1, 4, [0, 4]),
        ((0, 8), 2, 1, 0, [0, 8]),
    ],
)
def test_resources_of_a_host(
    cpus: tuple[int, ...], count: int, ranks: int, threads: int, resources: list[int]
) -> None:
    assert processors_of(cluster(*cpus), "n0", count, ranks, threads) == resources


@pytest.mark.parametrize(
    ("cpus", "count", "threads", "words"),
    [
        ((8,), 2, 0, r"--nnodes 2: .* the cluster has 1: 10.0.0.0 \(8 CPUs\); add nodes"),
        (
            (8, 2),
            2,
            4,
            r"needs 4 CPUs of its node.* 10.0.0.0 \(8 CPUs\), 10.0.0.1 \(2 CPUs\); lower --threads",
        ),
        ((2, 8), 2, 4, "needs 4 CPUs of its node"),
        ((8, 0), 2, 0, "needs 1 CPU of its node"),
    ],
)
def test_too_small_cluster_is_rejected(cpus: tuple[int, ...], count: int, threads: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        processors_of(cluster(*cpus), "n0", count, 1, threads)


ORDER = Order(
    count=2, ranks_per_host=1, threads=0, address="10.0.0.1", key=b"k" * 32, flags={}, log_level="INFO"
)
DRIVER = """
import os, sys
out = os.fdopen(int(sys.argv[-1]), "w", buffering=1)
if "refuses" in sys.argv:
    out.write('{"type": "Refused", "words": "no cluster"}\\n')
    sys.exit(78)
if "dies" in sys.argv:
    sys.exit(3)
out.write('{"type": "Joined", "address": "10.0.0.1"}\\n')
if "quits" in sys.argv:
    sys.exit(sys.stdin.readline() != "")
out.write('{"type": "Refused", "words": "%d received %s"}\\n' % (os.getpid(), "10.0.0.1" in sys.stdin.readline()))
if "leaves" in sys.argv:
    sys.exit(1)
sys.stdin.read()
"""
"""Each driver reports its process id, and True if it received the order."""


@contextmanager
def hosts_by(*words: str) -> Iterator[PlacedHosts]:
    hosts = PlacedHosts((sys.executable, "-c", DRIVER, *words))
    try:
        yield hosts
    finally:
        hosts.close()


def next_failure(hosts: PlacedHosts) -> Failure:
    found: list[Failure] = []

    def is_reported() -> bool:
        failure = hosts.look(time.monotonic())
        if failure is not None:
            found.append(failure)
        return failure is not None

    wait_until(is_reported, "a report")
    return found[0]


def test_ended_driver_is_replaced_with_the_same_order() -> None:
    with hosts_by("leaves") as hosts:
        assert hosts.join(30) == "10.0.0.1"
        hosts.place(ORDER)
        first, second = next_failure(hosts), next_failure(hosts)
        assert first.cause.endswith("received True") and second.cause.endswith("received True")
        assert first.cause != second.cause and first.exit_code == EXIT_CONFIG


def test_driver_ends_with_its_server() -> None:
    with hosts_by() as hosts:
        hosts.join(30)
        hosts.place(ORDER)
        pid = int(next_failure(hosts).cause.split()[0])
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("how", "words"), [("refuses", "no cluster"), ("dies", "exited with status 3; see the log above")]
)
def test_driver_that_cannot_join_fails_the_boot(how: str, words: str) -> None:
    with hosts_by(how) as hosts, pytest.raises(ConfigError, match=words):
        hosts.join(30)


def test_silent_exit_of_a_driver_is_reported() -> None:
    with hosts_by("quits") as hosts:
        hosts.join(30)
        hosts.place(ORDER)
        failure = next_failure(hosts)
        assert "exited with status 1, and the other hosts with it" in failure.cause and failure.exit_code == 1
