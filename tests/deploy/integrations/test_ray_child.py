"""Process of a Ray actor: a non-first host ends with its parent and reports boot errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml
from tests.processes.server import wait_until
from tests.processes.test_disaggregation import free_port

from quintet.deploy.supervisor import run_dirs
from quintet.wire.errors import EXIT_CONFIG


@contextmanager
def child(folder: Path, **flags: object) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Start one; yield it, its lifeline pipe, and its output pipe."""
    folder.mkdir()
    key = folder / "key"
    key.write_bytes(b"k" * 32)
    host = {
        "headless": True, "nnodes": 2, "pipeline_parallel_size": 2, "node_rank": 1, "group_key": str(key),
        "master_port": free_port(),
    }  # fmt: skip
    (folder / "server.yaml").write_text(yaml.safe_dump(host | flags))
    (held, lifeline), (output, written) = os.pipe(), os.pipe()
    command = [
        sys.executable,
        "-m",
        "quintet.deploy.integrations.ray.child",
        "--config",
        str(folder / "server.yaml"),
    ]
    process = subprocess.Popen(
        [*command, "--parent-fd", str(held), "--message-fd", str(written)], pass_fds=[held, written]
    )
    os.close(held)
    os.close(written)
    try:
        yield process, lifeline, output
    finally:
        process.kill()
        process.wait()
        os.close(output)


def test_host_ends_with_its_parent_and_removes_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    with child(folder) as (process, lifeline, _):
        wait_until(lambda: bool(psutil.Process(process.pid).children()), "the host's member")
        assert run_dirs.is_claimed(folder), "the run folder is removed after a kill"
        os.close(lifeline)
        assert process.wait(30) == 0
    assert not folder.exists()


def test_boot_error_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "host"
    with child(folder, model="/nowhere/model") as (process, lifeline, output):
        assert process.wait(30) == EXIT_CONFIG
        assert os.read(output, 4096) == b"MODEL '/nowhere/model': folder not found"
        os.close(lifeline)
    assert not folder.exists()
