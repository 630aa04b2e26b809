"""`--trace` on a real server, and `quintet trace`."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.deploy.tools.step_account import account, bars_of, read_folder, steps_of
from quintet.process.trace import WRITE_NOW, merge
from tests.processes.server import serve, wait_until

NUM_TOKENS = 12


def test_trace_has_the_phases_of_all_steps(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    with serve("--trace", str(folder)) as server:
        model = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[1]["model"]
        body = {
            "model": model,
            "prompt": "Once upon",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": False,
        }
        status, _ = server.post("/v1/completions", body)
        assert status == 200
        for child in server.children().values():
            child.send_signal(WRITE_NOW)
        wait_until(lambda: len(list(folder.glob("*.trace.json"))) == 5, "five trace files on request")
        assert server.get("/health")[0] == 200
        early = merge(read_folder(folder))
        assert server.post("/v1/completions", body)[0] == 200
        server.stop()
    bars = bars_of(merge(read_folder(folder)))
    assert len(bars) > len(bars_of(early))
    assert {bar.process for bar in bars} == {
        "core-0", "detokenizer-0", "executor-0", "frontend-0", "tokenizer-0",
    }  # fmt: skip

    def steps(role: str, name: str) -> list[int]:
        return [bar.number for bar in bars if bar.role == role and bar.name == name]

    planned = steps("core", "plan")
    assert len(planned) >= 2 * NUM_TOKENS
    for name in ("wait", "tables", "arrays", "layers", "logits", "sampling", "send"):
        assert steps("executor", name) == planned, name
    assert steps("core", "commit") == planned
    assert len(steps("tokenizer", "encode")) == 3
    executor = [bar for bar in bars if bar.role == "executor"]
    assert all(one.end_ns <= next_one.begin_ns for one, next_one in itertools.pairwise(executor))

    shown = subprocess.run(
        [sys.executable, "-m", "quintet.deploy.cli.main", "trace", str(folder)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert (folder / "merged.json").is_file()
    assert "layers" in shown and "median of" in shown


@pytest.mark.whole
@pytest.mark.parametrize(
    ("flag", "other"), [("--pipeline-parallel-size", "stage 1"), ("--tensor-parallel-size", "rank 1")]
)
def test_trace_of_two_ranks_has_compute_and_wait_shares(flag: str, other: str, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    with serve("--trace", str(folder), flag, "2", "--threads", "1") as server:
        model = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[1]["model"]
        body = {"model": model, "prompt": "Once upon", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        for child in server.children().values():
            child.send_signal(WRITE_NOW)
        wait_until(lambda: len(list(folder.glob("executor-*.trace.json"))) == 2, "both files")
        assert server.post("/v1/completions", body | {"stream": False})[0] == 200
        server.stop()
    bars = bars_of(merge(read_folder(folder)))
    runs = [bar.number for bar in bars if bar.role == other and bar.name == "layers"]
    assert sorted(set(runs)) == list(range(1, max(runs) + 1))
    assert max(runs) >= NUM_TOKENS
    parts = account(bars, steps_of(bars)).parts
    assert [part.process for part in parts] == ["executor-0", f"executor-0 {other}"]
    assert all(part.computed > 0.0 and part.waited > 0.0 for part in parts), parts
    assert all(part.computed + part.waited < 1.001 for part in parts), parts


def test_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "quintet.deploy.cli.main", "trace", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 78
    assert "--trace" in answer.stderr
