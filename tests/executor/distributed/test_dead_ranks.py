"""A rank that exits ends all ranks: rank 0 exits immediately, even while its main thread waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.executor.test_executor_process import config_of

from quintet.executor.distributed.parallel.follower_processes import ending
from quintet.process.child import error_file
from quintet.wire.errors import EXIT_CONFIG
from quintet.wire.ids import Role, WorkerId

RANK_0 = """
import sys, threading
import msgspec
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId

config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
followers = FollowerProcesses(WorkerId(Role.EXECUTOR, 3, 7), config)
print("started", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exited with status 0"), (-9, "was killed by SIGKILL"), (-37, "was killed by signal 37")],
)
def test_every_exit_status_has_a_description(status: int, words: str) -> None:
    assert ending(status) == words


def test_rank_0_exits_with_another_rank(tmp_path: Path) -> None:
    config = msgspec.json.encode(config_of(tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", RANK_0], **pipes) as first:
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(config + b"\n")
        first.stdin.flush()
        assert first.stdout.readline() == b"started\n"
        ranks = psutil.Process(first.pid).children()
        assert len(ranks) == 3
        ranks[2].kill()  # of the second stage
        assert first.wait(60) == 1
    words = error_file(tmp_path, WorkerId(Role.EXECUTOR, 3, 7)).read_text()
    assert words in [f"rank {rank} was killed by SIGKILL; all ranks exit" for rank in (1, 2, 3)]
    assert not psutil.wait_procs(ranks, 60)[1], "a rank is still running after the first exited"


@pytest.mark.whole  # it imports torch
def test_a_configuration_error_is_reported_by_its_rank(tmp_path: Path) -> None:
    config = msgspec.json.encode(config_of(tmp_path, tensor_parallel_size=2))  # the model does not exist
    words = [sys.executable, "-c", RANK_0]
    done = subprocess.run(words, input=config + b"\n", capture_output=True, timeout=60, check=False)
    assert done.returncode == EXIT_CONFIG
    assert error_file(tmp_path, WorkerId(Role.EXECUTOR, 3, 7)).read_text().startswith("rank 1: ")
