"""vLLM command lines: each flag is supported, accepted with a note, or rejected with an alternative."""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.documented_flags import PAGE, TAKEN, page, rows
from tests.deploy.config.model_folder import write_model

from quintet.deploy.cli import serve
from quintet.deploy.cli.main import CommandParser, main
from quintet.deploy.config import vllm_flags as flags
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flag import option as spelling
from quintet.deploy.config.flag_table import flag_table, make_options, merged_options
from quintet.deploy.config.flags import Options
from quintet.deploy.config.parsers import choose_parsers, reasoning_parser
from quintet.deploy.config.sglang_flags import LLAMA_CPP_FLAGS, SGLANG_FLAGS
from quintet.deploy.python_api.engine import options_of_call
from quintet.wire.errors import ConfigError


@functools.cache
def parser() -> argparse.ArgumentParser:
    made = CommandParser(allow_abbrev=False)
    serve.add_option_arguments(made)
    return made


def parsed(*words: str) -> tuple[Options, list[str]]:
    return serve.options_of(parser().parse_args(list(words)))


def test_documented_flags_are_current() -> None:
    keys = [key for key, _ in rows()]
    assert len(keys) == len(set(keys)) > 250
    assert PAGE.read_text() == page(), "run `python -m tests.deploy.config.documented_flags`"


def test_shared_flags_are_native_flags() -> None:
    native = {spec.key for spec in flag_table()}
    assert set(TAKEN) <= native
    assert {new.ours for new in flags.RENAMED.values()} <= native
    assert not flags.keys() & native


COMMON: list[tuple[list[str], dict[str, Any]]] = [
    (["--max-model-len", "1k"], {"max_model_len": 1000}),
    (["--max-model-len", "1.5K"], {"max_model_len": 1536}),
    (["--max-model-len", "auto"], {"max_model_len": None}),
    (["--max-model-len", "-1"], {"max_model_len": None}),
    (["--dtype", "half"], {"dtype": "float16"}),
    (["--dtype", "float"], {"dtype": "float32"}),
    (["-tp", "2", "-pp", "3", "-dp=4"], {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4}),
    (["--served-model-name", "a", "b"], {"served_model_name": ["a", "b"]}),
    (["--served-model-name", "a", "--served-model-name", "b"], {"served_model_name": ["a", "b"]}),
    (["--served-model-name", "a", "./folder"], {"served_model_name": ["a"], "model": "./folder"}),
    (["folder", "--api-key", "k", "l"], {"model": "folder", "api_key": ["k", "l"]}),
    (["--enable-log-requests"], {"log_requests": True}),
    (["--disable-log-requests"], {"log_requests": False}),
    (["--no-enable-log-requests"], {"log_requests": False}),
    (["--kv-cache-dtype", "fp8_e4m3"], {"kv_cache_dtype": "fp8"}),
    (["--kv-cache-memory-bytes", "4GiB"], {"kv_cache_memory": "4GiB"}),
    (["--kv-cache-dtype", "bfloat16"], {"kv_cache_dtype": "bfloat16"}),
    (["--kv-cache-dtype", "int8_per_token_head"], {"kv_cache_dtype": "int8"}),
    (["--kv-cache-dtype", "int4_per_token_head"], {"kv_cache_dtype": "int4"}),
    (["--kv-offloading-size", "2"], {"swap_space": 2.0}),
    (["--kv-offloading-size", "2.5"], {"swap_space": 2.5}),
    (["--quantization", "awq_marlin"], {"quantization": "awq"}),
    (["-q", "gptq_marlin"], {"quantization": "gptq"}),
    (["--quantization", "inc"], {"quantization": "auto-round"}),
    (["--quantization", "moe_wna16"], {}),
    (["--quantization", "int8_per_channel_weight_only"], {"quantization": "int8"}),
    (["--spec-method", "mtp", "--spec-tokens", "3"],
     {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}),
    (["--spec-model", "draft", "--speculative-config", '{"num_speculative_tokens": 2}'],
     {"speculative_config": {"num_speculative_tokens": 2, "model": "draft"}}),
    (["--reasoning-config", '{"reasoning_end_str": "</think>"}'], {"reasoning_config": {"reasoning_end_str": "</think>"}}),
    (["--disable-fastapi-docs"], {"disable_fastapi_docs": True}),
    (["--load-format", "runai_streamer"], {"load_format": "auto"}),
    (["--model-impl", "vllm"], {"model_impl": "quintet"}),
    (["--distributed-executor-backend", "uni"], {"distributed_executor_backend": "mp"}),
    (["-dp", "2", "--data-parallel-size-local", "2"], {"data_parallel_size": 2}),
    (["-dp", "2", "-dpl", "2"], {"data_parallel_size": 2}),
    (["-dpn", "0", "-pcp", "1"], {}),
    (["--quantization", "modelopt_mxfp8"], {"quantization": "modelopt"}),
    (["--api-server-count", "2"], {"frontends": 2}),
    (["--shutdown-timeout", "5"], {"drain_timeout": 5.0}),
    (["--load-format", "safetensors"], {"load_format": "auto"}),
    (["--model", "folder", "--max_model_len=1k"], {"model": "folder", "max_model_len": 1000}),
    (["--gpu_memory_utilization", "0.5", "--dtype", "bf16"], {"gpu_memory_utilization": 0.5, "dtype": "bfloat16"}),
    (["--tensor-parallel", "4", "--gpu_memory-util=0.9", "--max-num-seq", "1024"],
     {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.9, "max_num_seqs": 1024}),
    (["--speculative-conf.method=ngram", "--enforce", "true", "--no-enable-prefix"],
     {"speculative_config": {"method": "ngram"}, "enforce_eager": True, "enable_prefix_caching": False}),
    (["--max-num-batched-tokens", "8K"], {"max_num_batched_tokens": 8192}),
    (["--enforce-eager", "True", "folder"], {"enforce_eager": True, "model": "folder"}),
    (["-ep", "false", "folder"], {"enable_expert_parallel": False, "model": "folder"}),
    (["--enable_prefix_caching=false", "--no-enable-chunked-prefill=False"],
     {"enable_prefix_caching": False, "enable_chunked_prefill": True}),
    (["--dtype auto", "--max-model-len  1k", "--served-model-name a b", "--enforce-eager true", "--trust-remote-code ",
      '--hf-overrides {"a": "b c"}'],
     {"max_model_len": 1000, "served_model_name": ["a", "b"], "enforce_eager": True,
      "trust_remote_code": True, "hf_overrides": {"a": "b c"}}),
    (["--task", "generate", "--logprobs-mode", "raw_logprobs"], {"runner": "generate"}),
    (["--speculative-config.method", "ngram", "--speculative_config.num_speculative_tokens=3"],
     {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    (["-sc.method", "ngram", "--speculative-config", '{"num_speculative_tokens": 3}'],
     {"speculative_config": {"num_speculative_tokens": 3, "method": "ngram"}}),
    (["--hf-overrides.text_config.rope_theta", "5e5", "--hf-overrides.a+=1", "--hf-overrides.a+", '["b"]'],
     {"hf_overrides": {"text_config": {"rope_theta": 5e5}, "a": [1, "b"]}}),
    (["--hf-overrides.a+", "x", "--hf-overrides.a+=y,z"], {"hf_overrides": {"a": ["x", "y", "z"]}}),
    (["--override-generation-config.max_new_tokens", "8k"], {"override_generation_config": {"max_new_tokens": 8000}}),
    (["--revision", "main"], {"revision": "main"}),
    (["--chat_template", "None", "--tool-call-parser=None", "--max-model-len", "None", "--quantization", "None"], {}),
    (["--download-dir", "None", "--rope-scaling", "None", "--admin-key", "None"], {"admin_key": "None"}),
    (["--hf-overrides", '{"a": {"b": 1}}'], {"hf_overrides": {"a": {"b": 1}}}),
    (["--rope-scaling", '{"rope_type": "yarn"}', "--rope-theta", "1e6"],
     {"hf_overrides": {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1e6}}),
    (["--override-generation-config", '{"temperature": 0.5}'], {"override_generation_config": {"temperature": 0.5}}),
    (["--default-chat-template-kwargs", '{"enable_thinking": false}'],
     {"default_chat_template_kwargs": {"enable_thinking": False}}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "changes"), COMMON, ids=str)
def test_supported_flags_are_translated(words: list[str], changes: dict[str, Any]) -> None:
    options, notes = parsed(*words)
    assert options == make_options(changes, "the test") and notes == []


def test_flags_without_effect_are_accepted_with_a_note() -> None:
    for key in flags.ACCEPTED_SWITCHES:
        assert_noted(key, [spelling(key)])
    for key in flags.ACCEPTED_VALUES:
        assert_noted(key, [spelling(key), "x"])


def assert_noted(key: str, words: list[str]) -> None:
    options, [note] = parsed("folder", *words)
    assert options == Options(model="folder"), key
    assert note.startswith(spelling(key)) and "has no effect" in note


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN", "ROCM_AITER_FA", "FLASHINFER"])
def test_names_of_vllm_for_attention_backends_have_no_effect(name: str) -> None:
    options, [note] = parsed("folder", "--attention-backend", name)
    assert options == Options(model="folder") and note.startswith(f"--attention-backend {name} has no effect")
    assert parsed("--attention-backend", "flashinfer") == (Options(attention_backend="flashinfer"), [])


def test_the_environment_may_have_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    options, [note] = parsed("folder")
    assert options == Options(model="folder", api_key=["secret"]) and "VLLM_API_KEY" in note
    assert parsed("--api-key", "own") == (Options(api_key=["own"]), [])


def test_variables_without_effect_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "False")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert parsed("m")[1] == [
        "the environment variable VLLM_CPU_KVCACHE_SPACE has no effect: set --kv-cache-memory",
        "the environment variable VLLM_BATCH_INVARIANT has no effect: set --batch-invariant for a GPU; a CPU is always"
        " batch-invariant",
    ]


def test_flags_of_the_hub_set_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "old")
    monkeypatch.setenv("HF_HUB_CACHE", "old")
    assert parsed("folder", "--hf-token") == (Options(model="folder"), [])
    assert os.environ["HF_TOKEN"] == "old"
    assert parsed("--hf-token", "hf_1", "--download-dir", "/cache", "folder")[0] == Options(model="folder")
    assert (os.environ["HF_TOKEN"], os.environ["HF_HUB_CACHE"]) == ("hf_1", "/cache")


def test_an_empty_parser_name_is_none() -> None:
    assert choose_parsers("", "", {})[0] == choose_parsers("none", "none", {})[0]


@pytest.mark.parametrize(("word", "flag"), SGLANG_FLAGS.items())
def test_flags_of_sglang_are_hinted(word: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag == "MODEL" or flag in parser().format_help()
    with pytest.raises(SystemExit):
        parsed("folder", spelling(word), "1")
    assert f"did you mean {flag}?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"did you mean {flag}"):
        make_options({word: 1}, "LLM(...)")


@pytest.mark.parametrize(("word", "flag"), LLAMA_CPP_FLAGS.items())
def test_flags_of_llama_cpp_are_hinted(word: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names with one dash are no abbreviations: ``-t 8`` is not ``-tp 8``, and ``-c`` not ``-cc``."""
    assert flag == "MODEL" or flag in parser().format_help()
    for option in (f"-{word}", spelling(word)):
        with pytest.raises(SystemExit):
            parsed("folder", option, "1")
        assert f"unrecognized argument: {option}; did you mean {flag}?" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--enable-log", "--max-num"])
def test_ambiguous_abbreviations_are_not_accepted(word: str) -> None:
    with pytest.raises(SystemExit):
        parsed("folder", word, "x", "1")


@pytest.mark.parametrize(
    "words",
    [
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--cuda_graph_sizes", "8", "16"],
        ["--numa-bind-cpus", "0-3", "4-7,9"],
        ["-cc.mode=3", "--compilation-config.pass_config.enable_sp", "false"],
        ["--limit-mm-per-prompt.image", "0"],
        ["--structured-outputs-config.backend=xgrammar"],
        ["-O.mode=3"],
        ["-O3"],
        ["--enable-reasoning"],
    ],
    ids=str,
)
def test_their_spellings_keep_the_model(words: list[str]) -> None:
    options, notes = parsed(*words, "folder")
    assert options == Options(model="folder") and len(notes) == 1


def test_unsupported_flags_are_rejected_with_an_alternative() -> None:
    for key in flags.REFUSED_SWITCHES:
        assert_refused(key, [spelling(key)], [spelling(key).replace("--", "--no-")])
    for key in flags.REFUSED_VALUES:
        assert_refused(key, [spelling(key), "x"], [spelling(key), "0"])


def assert_refused(key: str, words: list[str], harmless: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*words)
    assert spelling(key) in str(caught.value)
    assert parsed(*harmless) == (Options(), []), key


def test_files_and_keyword_arguments_accept_them(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("max-model-len: 8k\nasync-scheduling: true\nhf-overrides: {a: 1}\ndtype: half\n")
    options, notes = merged_options(file, {})
    assert options == Options(max_model_len=8000, hf_overrides={"a": 1}, dtype="float16")
    assert len(notes) == 1
    assert make_options({"disable_log_stats": True, "max_model_len": "1K"}, "LLM(...)") == Options(
        max_model_len=1024
    )


class TorchDtype:
    """Stands for a data type of torch, which is no text."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"torch.{self._name}"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_keyword_arguments_accept_data_types_of_torch(name: str) -> None:
    assert make_options({"dtype": TorchDtype(name)}, "LLM(...)") == Options(dtype=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dtype is torch\.int8"):
        make_options({"dtype": TorchDtype("int8")}, "LLM(...)")


def test_switches_are_turned_off_as_in_vllms_files(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        'no-enable-prefix-caching: true\ndisable-log-requests: "True"\nno_async_scheduling: "true"\nenforce-eager: "true"\n'
    )
    options, notes = merged_options(file, {})
    assert options == Options(enable_prefix_caching=False, log_requests=False, enforce_eager=True)
    assert len(notes) == 1
    assert merged_options(file, {"enable_prefix_caching": True})[0] == Options(enforce_eager=True)


def test_none_is_the_default_as_in_vllm(tmp_path: Path) -> None:
    keys = [*flags.keys(), *(spec.key for spec in flag_table())]
    assert make_options(dict.fromkeys(keys), "LLM(...)") == Options()
    file = tmp_path / "server.yaml"
    file.write_text("quantization:\nssl-certfile: null\nlora-modules: ~\n")
    assert merged_options(file, {}) == (Options(), [])
    few = options_of_call("m", {"max_num_seqs": None, "max_num_batched_tokens": 8}, "LLM(...)")
    assert few.max_num_seqs == 8


def test_the_command_line_of_nemotron_nano_is_accepted() -> None:
    words = ["--reasoning-parser-plugin", "nano_v3_reasoning_parser.py", "--reasoning-parser", "nano_v3"]
    options, [note] = parsed("folder", *words)
    assert choose_parsers(options.reasoning_parser, "none", {})[0].reasoning == "nemotron_v3"
    assert "no effect" in note


def test_the_reasoning_parser_may_be_in_the_reasoning_config() -> None:
    config = ["--reasoning-config", '{"reasoning_parser": "qwen3"}']
    assert reasoning_parser(parsed(*config)[0]) == "qwen3"
    assert reasoning_parser(parsed(*config, "--reasoning-parser", "glm45")[0]) == "glm45"


def test_flags_override_a_file_with_their_spellings(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("kv-cache-memory-bytes: 1GiB\napi-server-count: 2\nrope-theta: 1\n")
    options, _ = merged_options(file, {"kv_cache_memory": "4GiB", "frontends": 3, "rope_theta": "2"})
    assert options == Options(kv_cache_memory="4GiB", frontends=3, hf_overrides={"rope_theta": 2.0})


def test_rope_settings_of_a_file_are_joined_with_the_flag_for_overrides(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "rope-theta: 5\ndata-parallel-size: 2\ndata-parallel-size-local: 2\nasync-scheduling: true\n"
    )
    flags = {"hf_overrides": {"max_position_embeddings": 64}, "async_scheduling": True}
    options, notes = merged_options(file, flags)
    assert options.hf_overrides == {"max_position_embeddings": 64, "rope_theta": 5.0}
    assert options.data_parallel_size == 2
    assert len(notes) == 1


@pytest.mark.parametrize("word", ["--help=all", "--help=ModelConfig", "--help"])
def test_their_help_is_the_whole_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("folder", word)
    assert ended.value.code == 0 and "--max-model-len" in capsys.readouterr().out


def test_hints_are_only_flags_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--context-length", "9"])
    assert "--max-model-len" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max-model-len", "many"], "--max-model-len is 'many'"),
        (["--max-model-len", "1.5"], "give an integer"),
        (["--hf-overrides", "{"], "--hf-overrides is '{', which is not JSON"),
        (["--hf-overrides", "[1]"], "give a JSON object"),
        (["--rope-theta", "big"], "--rope-theta is 'big'"),
    ],
)
def test_wrong_values_are_named(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("{", r"\{").replace(".", r"\.")):
        parsed(*words)


# effects


def resolved(folder: Path, **options: Any) -> Any:
    return resolve(
        Options(model=str(folder), executor="mock", **options), Path("/nowhere/quintet-test")
    ).config


def test_overrides_precede_the_model_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path, max_position_embeddings=64)
    model = resolved(folder, hf_overrides={"max_position_embeddings": 4096}).model
    assert model.max_model_len == 4096 and json.loads(model.hf_config)["max_position_embeddings"] == 4096


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_overrides_apply_to_both_config_forms(tmp_path: Path, key: str) -> None:
    folder = write_model(tmp_path, **{key: {"rope_type": "default", "rope_theta": 10000.0}})
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    model = resolved(folder, hf_overrides={"rope_scaling": scaling}).model
    assert model.max_model_len == 1024


@pytest.mark.parametrize(("named", "is_noted"), [("bfloat16", False), ("float16", True), ("float32", True)])
def test_a_kv_data_type_other_than_the_model_s_is_noted(tmp_path: Path, named: Any, is_noted: bool) -> None:
    options = Options(model=str(write_model(tmp_path)), executor="mock", kv_cache_dtype=named)
    resolution = resolve(options, Path("/nowhere/quintet-test"))
    assert resolution.config.cache.dtype == "model"
    noted = [
        note for note in resolution.notes if note.startswith(f"--kv-cache-dtype {named}: the KV cache has")
    ]
    assert bool(noted) == is_noted


def test_sampling_defaults_are_changed(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.5}')
    model = resolved(folder, override_generation_config={"temperature": 0.25}).model
    assert model.generation_defaults == {"temperature": 0.25, "top_p": 0.5}
