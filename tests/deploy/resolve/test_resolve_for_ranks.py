"""Parallel layouts over ranks: resolved sizes, and rejections with a fix."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model

from quintet.deploy.cli.main import main
from quintet.deploy.config import build
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.weights import check_weights_fit
from quintet.executor.model_config.share import most_outputs
from quintet.wire.errors import ConfigError

RUN_DIR = Path("/tmp/quintet-ranks")


def config_of(folder: Path, size: int, **flags: Any) -> Any:
    options = Options(
        model=str(folder), tensor_parallel_size=size, load_format="dummy", device="cpu", **flags
    )
    return resolve(options, RUN_DIR).config


def test_a_rank_has_its_heads_and_its_part_of_the_memory(tmp_path: Path) -> None:
    write_model(tmp_path)
    one, two, four = (
        config_of(tmp_path, size, kv_cache_memory="1MiB", swap_space=1 / 1024) for size in (1, 2, 4)
    )
    assert one.model.kv.bytes_per_token == 2 * two.model.kv.bytes_per_token
    assert two.model.kv == four.model.kv  # two KV heads: two ranks keep the same one
    assert [each.cache.memory_bytes for each in (one, two, four)] == [1 << 20, 1 << 19, 1 << 18]
    assert [each.cache.swap_bytes for each in (one, two, four)] == [1 << 20, 1 << 19, 1 << 18]
    assert [each.executor.tensor_parallel_size for each in (one, two, four)] == [1, 2, 4]


def test_plan_shows_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(write_model(tmp_path)), "--device", "cpu", "--load-format", "dummy"]
    assert main([*words, "--tensor-parallel-size", "4"]) == 0
    printed = capsys.readouterr().out
    has = "1 of 4 heads with 1 of 2 KV heads; 32 of 128 columns of feed-forwards; 25 of 100 logits"
    assert f"per rank          {has}\n" in printed
    assert "per rank (4 ranks)" in printed
    assert "executor ×1 of 4 ranks" in printed
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_ranks"], plan["share"], plan["shared_bytes"]) == (1, None, 0)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "at most 32.0 MiB, for all layers"),
        (
            ("--tensor-parallel-size", "2"),
            "at most 64.0 MiB, for all layers: 32.0 MiB in each of 2 processes",
        ),
        (
            ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
            "at most 128.0 MiB, for all layers: 32.0 MiB in each of 4 processes",
        ),
        (
            ("--tensor-parallel-size", "2", "--data-parallel-size", "2"),
            "at most 64.0 MiB, for all layers: 32.0 MiB in each of 2 processes, per engine",
        ),
    ],
)
def test_plan_shows_attention_memory_of_all_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], line: str
) -> None:
    words = ["plan", str(write_model(tmp_path)), "--device", "cpu", "--load-format", "dummy", *flags]
    assert main(words) == 0
    assert f"attention scratch {line}\n" in capsys.readouterr().out


def test_context_parallel_ranks_have_more_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks of two KV heads: each pair keeps the cache of one head, in the memory of both."""
    write_model(tmp_path)
    separate, together = (
        config_of(tmp_path, 4, kv_cache_memory="1MiB", swap_space=1 / 1024, decode_context_parallel_size=n)
        for n in (1, 2)
    )
    assert separate.model.kv == together.model.kv
    assert together.cache.memory_bytes == 2 * separate.cache.memory_bytes == 1 << 19
    assert together.cache.swap_bytes == 2 * separate.cache.swap_bytes
    assert (separate.executor.num_kv_memories, together.executor.num_kv_memories) == (4, 2)
    monkeypatch.setattr(build, "available_ram_bytes", lambda: 400 << 20)
    of_each, of_two = (
        config_of(tmp_path, 4, max_num_seqs=2048, decode_context_parallel_size=n).cache.memory_bytes
        for n in (1, 2)
    )
    assert 1.5 * of_each < of_two < 2 * of_each  # other shared memory grows too


@pytest.mark.parametrize(
    ("size", "context", "words"),
    [
        (1, 2, "is 2; it must divide --tensor-parallel-size 1"),
        (4, 3, "is 3; it must divide --tensor-parallel-size 4"),
        (2, 2, "with --tensor-parallel-size 2, no two ranks share a KV head, so drop the flag"),
        (4, 4, "with --tensor-parallel-size 4, valid sizes: 2$"),
        (4, 0, "--decode-context-parallel-size is 0; it must be at least 1"),
    ],
)
def test_invalid_context_parallel_layouts_are_rejected(
    tmp_path: Path, size: int, context: int, words: str
) -> None:
    write_model(tmp_path)
    with pytest.raises(ConfigError, match=words):
        config_of(tmp_path, size, decode_context_parallel_size=context)


def test_plan_shows_context_parallel_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(write_model(tmp_path)), "--device", "cpu", "--load-format", "dummy"]
    flags = ["--tensor-parallel-size", "4", "--decode-context-parallel-size", "2"]
    assert main([*words, *flags]) == 0
    assert "per group of 2 (4 ranks)" in capsys.readouterr().out
    assert main([*words, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_ranks"] == 2


def test_memory_shared_by_ranks_is_counted(tmp_path: Path) -> None:
    """Shared memory for all ranks' tokens reduces KV memory; each added engine needs it as well."""
    write_model(tmp_path)
    few, many = (config_of(tmp_path, 2, max_num_batched_tokens=tokens) for tokens in (256, 512))
    hidden = json.loads((tmp_path / "config.json").read_text())["hidden_size"]
    assert many.executor.shared_bytes - few.executor.shared_bytes == 256 * 2 * 2 * hidden * 4
    assert config_of(tmp_path, 1).executor.shared_bytes == 0


def test_shared_logits_are_counted_in_their_dtype(tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=50_000)
    flags: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 8}
    sums, rounded = (config_of(tmp_path, 2, logits_dtype=dtype, **flags) for dtype in ("float32", "model"))
    assert (sums.logits_item_bytes, rounded.logits_item_bytes) == (4, 2)
    rows = most_outputs(sums.scheduler)
    assert sums.executor.shared_bytes - rounded.executor.shared_bytes == rows * 50_000 * 2


def test_engines_of_several_ranks_share_processors_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "available_ram_bytes", lambda: 400 << 20)
    monkeypatch.setattr(build, "usable_cores", lambda: 3)
    write_model(tmp_path)
    flags = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 2048}
    options = Options(model=str(tmp_path), data_parallel_size=2, tensor_parallel_size=2, **flags)
    resolution = resolve(options, RUN_DIR)
    config = resolution.config
    assert (config.processes.engines, config.executor.tensor_parallel_size) == (2, 2)
    assert 0 < config.cache.memory_bytes < (100 << 20) - config.executor.shared_bytes // 2
    assert any("2 ranks of 2 engines share 3 cores" in note for note in resolution.notes)


def test_too_large_weights_are_reported_per_rank() -> None:
    with pytest.raises(
        ConfigError, match=r"2\.0 GiB, but 1\.0 GiB of memory is available for each of 4 ranks: "
    ):
        check_weights_fit(2 << 30, 1 << 30, num_engines=1, num_ranks=4)
    with pytest.raises(ConfigError, match="for each of 4 ranks of each of 2 engines: "):
        check_weights_fit(2 << 30, 1 << 30, num_engines=2, num_ranks=4)


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (3, {}, "has 4 heads, which cannot be sharded over 3 ranks; valid sizes: 2, 4"),
        (2, {"head_dim": 1024}, "key width 1024 and value width 1024; .* 576 and 512"),
        (2, {"intermediate_size": 129}, "has feed-forwards 129 wide, .*; valid sizes: none but 1"),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}, "2 KV heads, .*: 2"),
        (2, {"architectures": ["MixtralForCausalLM"], "intermediate_size": 129}, "has experts 129 wide"),
        (2, {"architectures": ["GptOssForCausalLM"]}, "whole experts can: add --enable-expert-parallel"),
        (
            3,
            {"architectures": ["MambaForCausalLM"]},
            "128 channels of states, .*; valid sizes: 2, 4, 8, 16, 32, 64",
        ),
        (
            2,
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            "a rank would have inputs 0 to 32, not whole groups of 128",
        ),
        (
            2,
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            "bitsandbytes weights cannot be sharded; supported formats: gptq, awq, compressed-tensors",
        ),
        (
            2,
            {
                "architectures": ["MixtralForCausalLM"],
                "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},
            },
            "columns of gptq experts cannot be sharded, only whole experts .add --enable-expert-parallel",
        ),
    ],
)
def test_indivisible_models_are_rejected(
    tmp_path: Path, size: int, changes: dict[str, Any], words: str
) -> None:
    write_model(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {size}: .*{words}"):
        config_of(tmp_path, size)


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (1, {}, "requires --tensor-parallel-size above 1"),
        (2, {}, "has no experts; drop the flag"),
        (
            4,
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2},
            "has 3 experts, .*; valid sizes: 2$",
        ),
    ],
)
def test_indivisible_expert_counts_are_rejected(
    tmp_path: Path, size: int, changes: dict[str, Any], words: str
) -> None:
    write_model(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        config_of(tmp_path, size, enable_expert_parallel=True)


@pytest.mark.parametrize(
    ("changes", "leaves"),
    [
        ({}, 4),
        ({"num_attention_heads": 8, "head_dim": 16}, 8),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}, 1),
        ({"architectures": ["MambaForCausalLM"]}, 8),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}, 2),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, 1),
    ],
    ids=["4 heads", "8 heads", "3 heads", "states", "3 experts", "stored codes"],
)
def test_summation_leaves_follow_from_the_model(tmp_path: Path, changes: dict[str, Any], leaves: int) -> None:
    write_model(tmp_path, **changes)
    assert config_of(tmp_path, 1).executor.sum_leaves == 1
    assert config_of(tmp_path, 1, layout_invariant=True).executor.sum_leaves == leaves


@pytest.mark.parametrize(
    ("size", "flags", "changes", "words"),
    [
        (3, {}, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 96},
         r"--tensor-parallel-size 3: .* 1 leaves, one branch per rank; valid sizes: 1$"),
        (2, {}, {"architectures": ["MixtralForCausalLM"]}, "columns of experts .* add --enable-expert-parallel"),
        (1, {"executor": "mock"}, {}, "is supported on CPUs only, and not by the mock"),
    ],
)  # fmt: skip
def test_layouts_with_different_bits_are_rejected(
    tmp_path: Path, size: int, flags: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    write_model(tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"--layout-invariant.*{words}"):
        config_of(tmp_path, size, layout_invariant=True, **flags)


def test_plan_shows_experts_of_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, architectures=["MixtralForCausalLM"], num_local_experts=6, num_experts_per_tok=2)
    words = ["plan", str(tmp_path), "--device", "cpu", "--load-format", "dummy", "--enable-expert-parallel"]
    assert main([*words, "--tensor-parallel-size", "2"]) == 0
    assert "1 of 2 KV heads; 3 of 6 experts; " in capsys.readouterr().out


def test_stages_divide_layers_and_count_hidden_state_buffers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of steps in flight is one more than the number of stages."""
    write_model(tmp_path, num_hidden_layers=5)
    words = [
        "plan",
        str(tmp_path),
        "--device",
        "cpu",
        "--load-format",
        "dummy",
        "--pipeline-parallel-size",
        "3",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "stages            layers 0 to 1, 2 to 3, 4 to 4\n" in printed
    assert "executor ×1 of 3 stages" in printed
    one, three = (
        config_of(tmp_path, 1, pipeline_parallel_size=stages, kv_cache_memory="1MiB") for stages in (1, 3)
    )
    assert (one.scheduler.max_steps_in_flight, three.scheduler.max_steps_in_flight) == (2, 4)
    options = Options(model=str(tmp_path), load_format="dummy", device="cpu", pipeline_parallel_size=3)
    notes = {
        depth: resolve(dataclasses.replace(options, max_steps_in_flight=depth), RUN_DIR).notes
        for depth in (3, 4)
    }
    assert [
        any("--max-steps-in-flight is 4, not 3: " in note for note in notes[depth]) for depth in (3, 4)
    ] == [
        True,
        False,
    ]
    assert one.cache == three.cache and one.model.kv == three.model.kv
    assert (one.executor.shared_bytes, three.executor.shared_bytes > 0) == (0, True)
    assert (
        three.executor.num_ranks,
        config_of(tmp_path, 2, pipeline_parallel_size=3).executor.num_ranks,
    ) == (3, 6)


def test_more_stages_than_layers_are_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=2)
    words = "has 2 layers, and each stage needs one; valid sizes: 1 to 2"
    with pytest.raises(ConfigError, match=f"--pipeline-parallel-size 3: .*{words}"):
        config_of(tmp_path, 1, pipeline_parallel_size=3)


def test_length_dependent_rope_is_rejected_over_several_hosts(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    write_model(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert config_of(tmp_path, 2).executor.num_ranks == 2
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size 2 --nnodes 2: RoPE of .* depends on the prompt length"
    ):
        config_of(tmp_path, 2, nnodes=2, group_key=str(key))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"block_size": 8}, "requires a block size that is a multiple of 16, but it is 8"),
        ({"executor": "mock"}, "the mock executor does not support ranks"),
        ({"device": "cuda", "decode_context_parallel_size": 2}, "supported on CPUs only"),
    ],
)
def test_unsupported_features_of_ranks_are_rejected(
    tmp_path: Path, flags: dict[str, Any], words: str
) -> None:
    options = {"model": str(write_model(tmp_path)), "device": "cpu", "load_format": "dummy"} | flags
    with pytest.raises(ConfigError, match=words):
        resolve(Options(**options, tensor_parallel_size=2), RUN_DIR)


def test_rank_count_is_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 0; it must be at least 1"):
        config_of(write_model(tmp_path), 0)
