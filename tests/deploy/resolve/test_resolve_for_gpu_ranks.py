"""Ranks on GPUs: resolved sizes, and flags rejected before any process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model
from tests.deploy.config.test_device import machine
from tests.deploy.resolve.test_resolve import complaint, resolved

from quintet.deploy.cli.main import main
from quintet.deploy.config import ranks
from quintet.deploy.config.device import num_gpus
from quintet.executor.backends.cuda.ops.collectives import SIZES

OPTIONS: dict[str, Any] = {"executor": "torch", "device": "cuda", "load_format": "dummy"}


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


def test_a_rank_has_its_heads_and_memory_of_its_gpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    one, two = (resolved(folder, **OPTIONS, tensor_parallel_size=size).config for size in (1, 2))
    assert one.model.kv.bytes_per_token == 2 * two.model.kv.bytes_per_token
    assert (two.executor.num_ranks, two.executor.shared_bytes, two.cache.memory_bytes) == (2, 0, 0)


def test_plan_shows_each_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(write_model(tmp_path)), "--device", "cuda", "--load-format", "dummy"]
    assert main([*words, "--tensor-parallel-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 4 heads with 1 of 2 KV heads" in printed
    assert "executor ×1 of 2 ranks" in printed
    assert main([*words, "--tensor-parallel-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_ranks"] == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tensor_parallel_size": 3}, "it must be one of 2, 4, 8"),
        ({"tensor_parallel_size": 8}, "needs 8 GPUs, one per rank, but 4 are visible"),
        ({"tensor_parallel_size": 4, "data_parallel_size": 2}, "4 with 2 engines needs 8 GPUs"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "--pipeline-parallel-size is supported on CPUs only",
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is supported on CPUs only"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "--enable-expert-parallel is supported on CPUs only",
        ),
        ({"tensor_parallel_size": 2, "layout_invariant": True}, "supported on CPUs only"),
    ],
)
def test_invalid_gpu_flags_are_rejected(tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    assert words in complaint(write_model(tmp_path), **OPTIONS, **flags)


def test_shards_with_unsupported_row_sizes_are_rejected(tmp_path: Path) -> None:
    """cuBLAS accepts any row size."""
    flags: dict[str, Any] = {**OPTIONS, "tensor_parallel_size": 2, "dtype": "bfloat16"}
    dense = write_model(tmp_path / "dense", intermediate_size=104)
    assert "rows of 52 numbers" in complaint(dense, **flags, batch_invariant=True)
    resolved(dense, **flags)
    changes = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    states = {"architectures": ["MambaForCausalLM"], "state_size": 16, "intermediate_size": 104}
    assert "rows of 52 numbers" in complaint(
        write_model(tmp_path / "states", **states), **flags, batch_invariant=True
    )
    one_group_each = {
        "architectures": ["Mamba2ForCausalLM"], "num_heads": 6, "head_dim": 4, "n_groups": 2, "state_size": 16,
        "hidden_size": 12, "expand": 2,
    }  # fmt: skip
    assert "rows of 12 numbers" in complaint(write_model(tmp_path / "groups", **one_group_each), **flags)
    experts = write_model(tmp_path / "experts", **changes, intermediate_size=104)
    assert "rows of 52 numbers" in complaint(experts, **flags)


def test_sizes_match_the_kernels() -> None:
    assert ranks.SIZES == SIZES


def test_gpus_are_counted_like_cuda(tmp_path: Path) -> None:
    two = machine(tmp_path / "two", "dev/nvidia0", "dev/nvidia1", "dev/nvidiactl")
    assert num_gpus({}, two) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "1"}, two) == 1
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, two) == 1
    assert num_gpus({"CUDA_VISIBLE_DEVICES": ""}, two) == 0
    assert num_gpus({}, machine(tmp_path / "none", "dev/null")) == 0
    windows = machine(tmp_path / "windows", "dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")
    assert num_gpus({}, windows) is None
