"""Resolution of options and a model folder to a configuration, or to a one-line error."""

from __future__ import annotations

import json
import math
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.deploy.config.model_folder import write_model, write_weights

from quintet.deploy.config import build, rules
from quintet.deploy.config.build import Resolution, resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.memory import (
    ATTENTION_SCRATCH_BYTES,
    format_size,
    parse_size,
)
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.model.weights import WeightFacts, read_weight_facts
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import full_layers

RUN_DIR = Path("/nowhere/quintet-test")
Memory = namedtuple("Memory", "available")


def resolved(folder: Path, **options: Any) -> Resolution:
    return resolve(Options(**{"model": str(folder), "executor": "mock", **options}), RUN_DIR)


def complaint(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# whole configurations


def test_a_local_folder_becomes_a_configuration(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [3, 4], "temperature": 0.6, "max_new_tokens": 9}'
    )
    config = resolved(folder, api_key=["k"], port=0, seed=5).config
    assert config.model.kv == full_layers(2, 2, 16, 2, 16)
    assert config.model.served_names == [str(folder)]
    assert config.model.eos_token_ids == [3, 4, 2]
    assert config.model.generation_defaults == {"temperature": 0.6, "max_tokens": 9}
    assert (config.model.dtype, config.model.max_model_len) == ("bfloat16", 512)
    assert config.model.path == config.model.tokenizer_path == str(folder)
    assert (config.frontend.api_keys, config.executor.seed, config.executor.kind) == (["k"], 5, "mock")
    assert (config.processes.frontends, config.processes.external_frontends) == (1, 0)
    file = tmp_path / "config.json"
    config.write(file)
    assert EngineConfig.read(file) == config


def test_python_api_has_no_frontend_processes(tmp_path: Path) -> None:
    options = Options(model=str(write_model(tmp_path)), executor="mock")
    processes = resolve(options, RUN_DIR, http=False, external_frontends=1).config.processes
    assert (processes.frontends, processes.external_frontends) == (0, 1)


def test_served_names_dtype_and_tokenizer_can_be_chosen(tmp_path: Path) -> None:
    folder, other = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    config = resolved(folder, served_model_name=["x", "y"], dtype="float32", tokenizer=str(other)).config
    assert config.model.served_names == ["x", "y"]
    assert config.model.kv == full_layers(2, 2, 16, 4, 16)
    assert config.model.tokenizer_path == str(other)


def test_generation_defaults_can_be_switched_off_without_losing_the_end_of_sequence(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "top_p": 0.5}')
    model = resolved(folder, generation_config="none").config.model
    assert (model.generation_defaults, model.eos_token_ids) == ({}, [7, 2])


@pytest.mark.parametrize(
    ("given", "kept", "words"),
    [
        ([2, 100], [2], "eos_token_id 100 of"),
        ([-1, 5000], [], "only max_tokens and stop strings end a response"),
        ([2, 99], [2, 99], None),
    ],
)
def test_eos_beyond_the_vocabulary_is_ignored_with_a_note(
    tmp_path: Path, given: list[int], kept: list[int], words: str | None
) -> None:
    """The executor would reject every plan that names it."""
    resolution = resolved(write_model(tmp_path, eos_token_id=given))
    assert resolution.config.model.eos_token_ids == kept
    notes = [note for note in resolution.notes if "eos_token_id" in note]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


@pytest.mark.parametrize(
    ("model_value", "given", "kept"),
    [
        ("max_new_tokens", 9, 9),
        ("max_new_tokens", 1e9, 511),
        ("max_new_tokens", 512, 511),
        ("max_new_tokens", 0, None),
        ("max_new_tokens", math.inf, None),
        ("max_new_tokens", math.nan, None),
        ("top_k", 50.0, 50),
        ("top_k", 2.5, None),
        ("top_k", -7, None),
        ("top_p", 0, None),
        ("top_p", 1, 1),
        ("temperature", 2.5, None),
        ("repetition_penalty", 0.0, None),
        ("min_p", -0.1, None),
    ],
)
def test_invalid_sampling_default_is_clamped_or_ignored_with_a_note(
    tmp_path: Path, model_value: str, given: float, kept: float | None
) -> None:
    """Requests that omit the parameter would be rejected or lost."""
    folder = write_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({model_value: given}))
    resolution = resolved(folder)
    native_value = "max_tokens" if model_value == "max_new_tokens" else model_value
    defaults = resolution.config.model.generation_defaults
    assert defaults == ({} if kept is None else {native_value: kept})
    assert [type(value) for value in defaults.values()] == [type(kept)] * len(defaults)
    assert [native_value in note for note in resolution.notes] == [True] * (kept is None)


# rules


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 513}, ["--max-model-len is 513", "512", "set at most 512"]),
        ({"max_num_batched_tokens": 8}, ["--max-num-batched-tokens is 8", "--max-num-seqs 256", "to 8"]),
        (
            {"max_num_batched_tokens": 300, "enable_chunked_prefill": False},
            ["--max-num-batched-tokens is 300", "512", "enable chunked prefill"],
        ),
        ({"max_steps_in_flight": 0}, ["--max-steps-in-flight is 0", "at least 1"]),
        ({"port": 70000}, ["--port is 70000", "65535"]),
        ({"frontends": 0}, ["--frontends is 0", "at least 1"]),
        ({"tokenizers": 999}, ["--tokenizers is 999", "at most 512"]),
        ({"kv_cache_memory_share": 1.5}, ["--kv-cache-memory-share is 1.5", "0.95"]),
        ({"boot_timeout": 0.0}, ["--boot-timeout is 0.0", "more than 0"]),
        ({"write_timeout": 0.0}, ["--write-timeout is 0.0", "more than 0"]),
        ({"kv_cache_memory": "lots"}, ["--kv-cache-memory is 'lots'", "2GiB"]),
        ({"kv_cache_memory": "100KiB", "max_model_len": 512}, ["needs 128.0 KiB", "--max-model-len to 400"]),
        ({"kv_cache_memory": 100}, ["needs 128.0 KiB", "--kv-cache-memory 1MiB"]),
        ({"executor": "torch", "step_ms": 1.0}, ["--step-ms 1.0", "--executor mock"]),
        ({"executor": "torch", "mock_script": "a.json"}, ["--mock-script a.json", "--executor mock"]),
        ({"executor": "torch"}, ["has no weights (model.safetensors", "--load-format dummy"]),
        ({"chat_template": "absent.jinja"}, ["--chat-template 'absent.jinja'"]),
    ],
)
def test_each_error_names_the_flag_and_the_fix(
    tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    noted = complaint(write_model(tmp_path), **options)
    for word in words:
        assert word in noted


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_advised_kv_memory_is_enough(num_ranks: int, tmp_path: Path) -> None:
    length = 4890 * 16  # blocks of 16 tokens need 19.1016 MiB
    folder = write_model(tmp_path, max_position_embeddings=length)
    flags: dict[str, Any] = {"executor": "torch", "load_format": "dummy", "device": "cpu"}
    flags |= {"max_model_len": length, "tensor_parallel_size": num_ranks}
    advised = re.search(r"set --kv-cache-memory (\w+)", complaint(folder, kv_cache_memory="1MiB", **flags))
    assert advised is not None and advised[1] == "20MiB"
    assert resolved(folder, kv_cache_memory=advised[1], **flags).config.model.max_model_len == length


def test_step_budget_grows_to_the_other_flags_minimum(tmp_path: Path) -> None:
    folder = write_model(tmp_path, max_position_embeddings=5000)
    assert resolved(folder).config.scheduler.max_num_batched_tokens == 2048
    assert resolved(folder, max_num_seqs=3000).config.scheduler.max_num_batched_tokens == 3000
    assert resolved(folder, enable_chunked_prefill=False).config.scheduler.max_num_batched_tokens == 5000


def test_latency_target_defaults_on_cpu_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path)

    def target(**options: Any) -> int:
        options = {"kv_cache_memory": "1MiB", "load_format": "dummy", **options}
        return resolved(folder, **options).config.scheduler.step_target_ms

    assert target() == 0
    assert target(executor="torch", device="cuda") == 0
    assert target(executor="torch", device="cpu") == 300
    assert target(executor="torch", device="cpu", step_target_ms=0) == 0
    assert target(executor="torch", device="cuda", step_target_ms=40) == 40
    assert "--step-target-ms is -1" in complaint(folder, step_target_ms=-1)


def test_default_context_shrinks_to_memory(tmp_path: Path) -> None:
    resolution = resolved(write_model(tmp_path), kv_cache_memory="64KiB")
    assert resolution.config.model.max_model_len == 256
    assert resolution.notes == ["max_model_len is 256, not the model's 512: the KV cache has 64.0 KiB"]


def test_kv_memory_is_bounded_by_all_slots(tmp_path: Path) -> None:
    config = resolved(write_model(tmp_path), kv_cache_memory="8GiB", max_num_seqs=2).config
    assert config.model.kv.num_blocks(config.cache.memory_bytes) == 2 * 512 // 16 + 1


def test_kv_memory_is_a_share_of_memory_after_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path)
    write_weights(folder / "model.safetensors", {"w": [1000, 500]})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(3_000_000 + ATTENTION_SCRATCH_BYTES))
    options: dict[str, Any] = {"executor": "torch", "device": "cpu", "kv_cache_memory_share": 0.5}
    assert resolved(folder, **options).config.cache.memory_bytes == 1_000_000
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(2 * (3_000_000 + ATTENTION_SCRATCH_BYTES)))
    two = resolved(folder, **options, data_parallel_size=2).config
    assert (two.cache.memory_bytes, two.processes.engines) == (1_000_000, 2)


def test_more_engines_than_cores_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    folder = write_model(tmp_path)
    write_weights(folder / "model.safetensors", {"w": [1000, 500]})
    notes = {
        count: resolved(folder, executor="torch", device="cpu", data_parallel_size=count).notes
        for count in (2, 3)
    }
    assert not any("engines share" in note for note in notes[2])
    assert any("--data-parallel-size 3: the engines share 2 cores" in note for note in notes[3])


def test_swap_space_defaults_to_gpus_only() -> None:
    gib = 1 << 30
    assert rules.derive_swap_bytes(None, "cpu", "torch", 64 * gib) == 0
    assert rules.derive_swap_bytes(None, "cuda", "torch", 64 * gib) == 4 * gib
    assert rules.derive_swap_bytes(None, "cuda", "torch", 8 * gib) == 2 * gib
    assert rules.derive_swap_bytes(0.5, "cpu", "torch", 64 * gib) == gib // 2
    for requested, kind, words in (
        (-1, "torch", "at least 0"),
        (65, "torch", "64.0 GiB"),
        (1, "mock", "drop the flag"),
    ):
        with pytest.raises(ConfigError, match=f"--swap-space.*{words}"):
            rules.derive_swap_bytes(requested, "cuda", kind, 64 * gib)


def test_quantized_weights_leave_more_to_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(1 << 30))
    folder = write_model(tmp_path, max_position_embeddings=1 << 20)
    write_weights(folder / "model.safetensors", {"a": [1000, 1000]})
    bytes_of = {
        name: resolved(folder, executor="torch", device="cpu", quantization=name).config.cache.memory_bytes
        for name in ("none", "int8", "int4")
    }
    assert bytes_of["none"] < bytes_of["int8"] < bytes_of["int4"]


@pytest.mark.parametrize(("narrow", "head_bytes"), [("int8", 16 + 4), ("int4", 8 + 4)])
def test_quantized_cache_is_counted_with_its_scales(tmp_path: Path, narrow: str, head_bytes: int) -> None:
    folder = write_model(tmp_path)
    options = {"executor": "torch", "device": "cpu", "load_format": "dummy", "kv_cache_dtype": narrow}
    config = resolved(folder, **options).config
    assert config.cache.dtype == narrow
    assert config.model.kv.bytes_per_token == 2 * 2 * 2 * head_bytes
    words = complaint(folder, **options, block_size=8)
    assert "--block-size is 8" in words


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"activation_dtype": "int8"},
        {"packed_cache": "x"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int4"},
    ],
)
def test_host_kernel_features_are_rejected_on_gpu(tmp_path: Path, options: dict[str, str]) -> None:
    flag = "--" + next(iter(options)).replace("_", "-")
    words = complaint(write_model(tmp_path), executor="torch", device="cuda", load_format="dummy", **options)
    assert flag in words and "--device cpu" in words


def test_inputs_are_not_rounded_where_weights_are_no_integers(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    requested: dict[str, str] = {"executor": "torch", "load_format": "dummy", "activation_dtype": "int8"}
    assert "--quantization int8 or int4" in complaint(folder, **requested)
    config = resolved(folder, **requested, quantization="int4").config
    assert config.executor.activation_dtype == "int8"


def test_a_server_open_to_the_network_without_a_key_is_noted(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert any("--api-key" in note for note in resolved(folder, host="0.0.0.0").notes)
    assert resolved(folder, host="0.0.0.0", api_key=["k"]).notes == []


def test_a_run_dir_too_deep_for_sockets_is_rejected() -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        rules.check_run_dir_length(Path("/" + "x" * 90))


def test_the_length_of_a_run_dir_is_in_bytes() -> None:
    with pytest.raises(ConfigError, match="would have 126 bytes"):
        rules.check_run_dir_length(Path("/" + "é" * 50))


# sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512M", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        (4096, 4096),
        ("1k", 1024),
        ("3tib", 3 << 40),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize("text", ["", "-1", "2GiBs", "GiB", "1e9", "two"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--x is .*write a size like 2GiB"):
        parse_size(text, "--x")


def test_sizes_are_written_with_a_unit() -> None:
    assert [format_size(size) for size in (12, 2048, 3 << 20, 5 << 30, 2 << 40)] == [
        "12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB", "2.0 TiB",
    ]  # fmt: skip


# model config

BY_DIMENSION = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 512),
        ({"rope_type": "default"}, 512),
        ({"type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            512,
        ),
        ({"rope_type": "longrope", "factor": 8.0, **BY_DIMENSION}, 512),
    ],
)
def test_rope_scaling_stretches_the_context(tmp_path: Path, rope: dict[str, Any] | None, length: int) -> None:
    assert read_facts(write_model(tmp_path / "a", rope_scaling=rope)).spec.reach == length
    assert read_facts(write_model(tmp_path / "b", rope_parameters=rope)).spec.reach == length


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_rotated_by_length_are_not_shared(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128, **BY_DIMENSION}
    folder = write_model(tmp_path / "stretched", rope_scaling=rope)
    long = resolved(folder)
    assert not long.config.cache.enable_prefix_caching
    assert any("prefix caching is disabled" in note and "128" in note for note in long.notes)
    short = resolved(folder, max_model_len=128)
    assert short.config.cache.enable_prefix_caching
    assert not any("prefix caching" in note for note in short.notes)


def test_missing_dimensions_are_derived(tmp_path: Path) -> None:
    hf_config = read_facts(write_model(tmp_path, num_key_value_heads=None, dtype=None, torch_dtype="float16"))
    assert hf_config.dtype == "float16"
    assert {need and (need.num_kv_heads, need.key_dim) for need in hf_config.kv_needs} == {(4, 16)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"architectures": []}, "has neither `architectures` nor `model_type`"),
        ({"partial_rotary_factor": 8}, "partial_rotary_factor is 8; it must be a number from 0 to 1"),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor is -1; it must be a number from 0 to 1"),
        (
            {"partial_rotary_factor": 0},
            "rotates an even number of a head's 16 elements, at least 2; 0 rotates 0",
        ),
        ({"partial_rotary_factor": 0.2}, "0.2 rotates 3"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor is True"),
        ({"head_dim": 7}, "at least 2; 1 rotates 7"),
        ({"head_dim": 1 << 40}, "head_dim is 1099511627776; it must be an integer from 1 to 1024"),
        (
            {"num_attention_heads": 3, "head_dim": 16},
            "num_key_value_heads is 2; it must be a divisor of num_attention_heads, 3",
        ),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0; it must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be an integer from 1 to 1024"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 2}, "head_dim is missing; it must be an integer"),
        ({"intermediate_size": "128"}, "intermediate_size is '128'"),
        ({"vocab_size": 1 << 31}, "vocab_size is 2147483648; it must be an integer from 1 to 16777216"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be a number from 1e-12 to 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number from 1e-12 to 1"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 1000000000000000000000000000000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor is missing; it must be a number from 1 to",
        ),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor is inf"),
        (
            {"rope_scaling": {"type": "linear", "factor": 1e5}},
            "a context of at most 16777216, not 51200000",
        ),
        (
            {"rope_parameters": {"rope_type": 7}},
            "rope_parameters.rope_type is 7; it must be one of default, linear",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "one setting for all layers"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [0.0] * 8,
                }
            },
            "rope_parameters.long_factor is [0.0, 0.0",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "high_freq_factor is 4; it must be above low_freq_factor, 4",
        ),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; it must be one of silu"),
        ({"quantization_config": "gptq"}, "quantization_config is 'gptq'; it must be an object"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window is 0; it must be an integer from 1",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types is ['full_attention']; it must be a list of 2 words",
        ),
        (
            {"architectures": ["ExaoneMoeForCausalLM"], "swiglu_limits": [0.0, 7.0]},
            "swiglu_limits is [0.0, 7.0]; it must be zeros",
        ),
        ({"architectures": ["OurForCausalLM"], "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"dtype": "complex64"}, "dtype is 'complex64'"),
    ],
)
def test_invalid_config_names_the_key(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    noted = complaint(write_model(tmp_path, **changes))
    assert words in noted
    assert "config.json" in noted


@pytest.mark.parametrize(
    ("architecture", "changes", "kv_heads", "head_dim"),
    [
        ("LlamaForCausalLM", {}, 4, 16),
        ("MistralForCausalLM", {"num_attention_heads": 16}, 8, 4),
        ("Qwen3ForCausalLM", {}, 4, 128),
        ("OurForCausalLM", {}, 4, 16),
    ],
)
def test_missing_config_keys_use_family_defaults(
    tmp_path: Path, architecture: str, changes: dict[str, Any], kv_heads: int, head_dim: int
) -> None:
    """The executor builds the model with the same numbers."""
    folder = write_model(tmp_path, architectures=[architecture], num_key_value_heads=None, **changes)
    facts = read_facts(folder)
    assert {need and (need.num_kv_heads, need.key_dim) for need in facts.kv_needs} == {(kv_heads, head_dim)}


def test_weights_larger_than_memory_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    folder = write_model(tmp_path, hidden_size=1 << 20, intermediate_size=1 << 20, head_dim=16)
    noted = complaint(folder, executor="torch", device="cpu", load_format="dummy")
    assert "the weights need 12.0 TiB, but" in noted


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"a": ' * 100_000, "\x00", '{"a": 1' + "0" * 5000 + "}"]
)
def test_broken_json_is_named(tmp_path: Path, text: str) -> None:
    folder = write_model(tmp_path)
    (folder / "config.json").write_text(text)
    assert "config.json is not valid JSON" in complaint(folder)


# files


def test_weights_are_measured_by_their_headers(tmp_path: Path) -> None:
    write_weights(tmp_path / "a.safetensors", {"x": [10, 3], "y": [5]})
    write_weights(tmp_path / "b.safetensors", {"z": [7]})
    assert read_weight_facts(tmp_path) == WeightFacts(num_parameters=42, size_bytes=84)
    index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_weight_facts(tmp_path) == WeightFacts(num_parameters=35, size_bytes=70)


def test_a_single_file_precedes_an_index_of_missing_files(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", {"x": [10]})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "b.safetensors"}}')
    assert read_weight_facts(tmp_path).num_parameters == 10
    write_weights(tmp_path / "b.safetensors", {"x": [7]})
    assert read_weight_facts(tmp_path).num_parameters == 7


def test_a_missing_shard_or_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ConfigError, match=r"a\.safetensors: not a readable safetensors file"):
        read_weight_facts(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "b.safetensors"}}')
    with pytest.raises(ConfigError, match=r"b\.safetensors: is missing, though .* lists it"):
        read_weight_facts(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_weights(path, {"x": [100]})
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with pytest.raises(ConfigError, match=r"'x' is at \[0, 200\] of 150 bytes; the file may be truncated"):
        read_weight_facts(tmp_path)


def test_unsupported_weight_formats_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.pt has an unsupported format"):
        read_weight_facts(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.gguf is a complete model: pass its path"):
        read_weight_facts(tmp_path)
