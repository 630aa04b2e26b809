"""Ranks as processes, without the server: their common result and their end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from tests.executor.conftest import Drawer, plan_of

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.registry import make_worker
from quintet.process.child import error_file
from quintet.wire.codec import pack_i32
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId
from quintet.wire.params import SamplingParams
from quintet.wire.step import StepPlan, StepResult

EXECUTOR_ID = WorkerId(Role.EXECUTOR, 0, 1)
RANK_0 = """
import sys, threading
import msgspec
from quintet.executor.main import make_worker
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.backends.platforms.shares import take_share
from quintet.process.spans import no_span
from quintet.wire.config import EngineConfig
from quintet.wire.ids import Role, WorkerId
from quintet.wire.step import StepPlan

config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
plan = msgspec.json.decode(sys.stdin.readline(), type=StepPlan)
followers = FollowerProcesses(WorkerId(Role.EXECUTOR, 0, 1), config)
worker = make_worker(take_share(0, config), no_span, followers)
print(msgspec.json.encode(worker.begin(plan).result()).decode(), flush=True)
threading.Event().wait()
"""


def config_of(
    run_dir: Path, size: int, threads: int = 1, stages: int = 1, drafts: str | None = None
) -> EngineConfig:
    """Return the configuration of the embedded model."""
    options = Options(
        device="cpu", tensor_parallel_size=size, pipeline_parallel_size=stages, threads=threads,
        max_model_len=256, max_num_seqs=4, kv_cache_memory="4MiB", speculative_config=drafts,
    )  # fmt: skip
    return resolve(options, run_dir, http=False).config


def prompt() -> StepPlan:
    """Return a step that computes a prompt and draws the next token."""
    drawer = Drawer(SamplingParams(temperature=0.0, logprobs=5), prompt=list(range(40, 52)))
    columns = {"starts": pack_i32([0]), "counts": pack_i32([len(drawer.prompt)])}
    return msgspec.structs.replace(plan_of([drawer], [2]), blocks=pack_i32([2, 0, 0, 3]), **columns)


@contextmanager
def ranks_of(config: EngineConfig) -> Iterator[tuple[subprocess.Popen[bytes], StepResult]]:
    """Run the ranks, rank 0 first; yield its process and its result."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", RANK_0], **pipes) as first:
        assert first.stdin is not None and first.stdout is not None
        try:
            first.stdin.write(msgspec.json.encode(config) + b"\n" + msgspec.json.encode(prompt()) + b"\n")
            first.stdin.flush()
            yield first, msgspec.json.decode(first.stdout.readline(), type=StepResult)
        finally:
            first.kill()


def test_two_ranks_draw_the_tokens_of_one_process_and_end_together(tmp_path: Path) -> None:
    alone = make_worker(config_of(tmp_path, 1)).begin(prompt()).result()
    with ranks_of(config_of(tmp_path, 2)) as (first, together):
        assert together.token_ids == alone.token_ids
        ours, theirs = (np.frombuffer(each.logprobs[0].logprobs, np.float32) for each in (alone, together))
        assert np.allclose(ours, theirs, atol=0.1), "logits must be those of the same model"
        [rank] = psutil.Process(first.pid).children()
        rank.kill()
        assert first.wait(60) == 1
    assert error_file(tmp_path, EXECUTOR_ID).read_text() == "rank 1 was killed by SIGKILL; all ranks exit"


def test_two_stages_draw_the_tokens_of_one_process_and_end_together(tmp_path: Path) -> None:
    alone = make_worker(config_of(tmp_path, 1)).begin(prompt()).result()
    with ranks_of(config_of(tmp_path, 1, stages=2)) as (first, together):
        assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)
        [stage] = psutil.Process(first.pid).children()
        stage.kill()
        assert first.wait(60) == 1
    assert error_file(tmp_path, EXECUTOR_ID).read_text() == "rank 1 was killed by SIGKILL; all ranks exit"


@pytest.mark.whole
def test_bits_do_not_depend_on_the_threads_of_a_rank(tmp_path: Path) -> None:
    results = []
    for threads in (1, 2):
        with ranks_of(config_of(tmp_path, 2, threads)) as (_, result):
            results.append((result.token_ids, result.logprobs))
    assert results[0] == results[1]
