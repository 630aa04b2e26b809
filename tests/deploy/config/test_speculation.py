"""``--speculative-config``: vLLM's JSON, and errors that name the key."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quintet.deploy.config.flags import Options
from quintet.deploy.config.speculation import (
    MTP_ALIASES,
    check_model,
    notes_on_device,
    notes_on_keys,
    speculation,
    speculative_config,
)
from quintet.wire.config import SpeculativeConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvGroup, KvSpec


def config_of(text: str | None, **options: Any) -> SpeculativeConfig | None:
    given = dataclasses.replace(Options(), speculative_config=text, **options)
    return speculative_config(given, "torch", "cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ('{"num_speculative_tokens": 3}', (3, 2, 5)),
        ('{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}', (8, 4, 4)),
        ('{"num_speculative_tokens": 1, "prompt_lookup_min": 1, "prompt_lookup_max": 3}', (1, 1, 3)),
        ('{"method": "suffix", "num_speculative_tokens": 7}', (7, 2, 5)),
        ('{"method": "mtp", "num_speculative_tokens": 2}', (2, 2, 5)),
        ('{"model": "[ngram]", "num-speculative-tokens": 3, "draft_tensor_parallel_size": 1}', (3, 2, 5)),
        ('{"method": "ngram_gpu", "num_speculative_tokens": 3, "parallel_drafting": false}', (3, 2, 5)),
    ],
)
def test_keys_are_read(text: str | None, expected: tuple[int, int, int] | None) -> None:
    config = config_of(text)
    found = config and (config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
    assert found == expected


def test_keys_without_effect_are_noted() -> None:
    text = (
        '{"method": "eagle3", "model": "x", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1, '
        '"disable_padded_drafter_batch": true, "quantization": "awq", "kv_cache_dtype": null}'
    )
    config, options = config_of(text), dataclasses.replace(Options(), speculative_config=text)
    assert config is not None and config.method == "eagle3"
    [note] = notes_on_keys(options)
    names = (
        "disable_padded_drafter_batch, draft_tensor_parallel_size, quantization (with a draft model or head, "
    )
    assert note.endswith(f"keys without effect: {names}none, int8, int4, w8a8 have one)")
    options = dataclasses.replace(options, speculative_config=text.replace("awq", "int8"))
    assert "quantization" not in notes_on_keys(options)[0]
    text = '{"method": "ngram", "num_speculative_tokens": 2, "quantization": "int8"}'
    [note] = notes_on_keys(dataclasses.replace(options, speculative_config=text))
    assert "keys without effect: quantization (with a draft model or head" in note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "write JSON such as"),
        ('{"method": "ngram"}', "num_speculative_tokens"),
        (
            '{"method": "beam", "num_speculative_tokens": 4}',
            'the method is "beam"; it must be one of ngram, suffix',
        ),
        ('{"method": "draft_model", "num_speculative_tokens": 4}', "needs the key model"),
        ('{"method": "eagle", "num_speculative_tokens": 4}', "the method eagle needs the key model"),
        ('{"method": "medusa", "num_speculative_tokens": 4}', "the method medusa needs the key model"),
        ('{"method": "eagle3", "num_speculative_tokens": 4}', "the method eagle3 needs the key model"),
        ('{"method": "ngram", "model": "x", "num_speculative_tokens": 4}', "the key model is only for"),
        ('{"method": "mtp", "model": "x", "num_speculative_tokens": 4}', "the key model is only for"),
        ('{"model": "x", "num_speculative_tokens": 4, "prompt_lookup_min": 2}', "prompt_lookup_min"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0; it must be 1 to 32"),
        (
            '{"num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 2}',
            "prompt_lookup_min is 5",
        ),
        (
            '{"num_speculative_tokens": 4, "prompt_lookup_min": 0, "prompt_lookup_max": 5}',
            "prompt_lookup_min is 0",
        ),
        ('{"num_speculative_tokens": 4, "tree": "x"}', "tree"),
        ('{"num_speculative_tokens": 4, "parallel_drafting": true}', "parallel_drafting"),
        (
            '{"method": "suffix", "prompt_lookup_max": 4}',
            "the key prompt_lookup_max is only for the method ngram: drop",
        ),
        (
            '{"num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 9}',
            "the key suffix_decoding_max_tree_depth is only for the method suffix: drop",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_tree_depth": 1}',
            "suffix_decoding_max_tree_depth is 1; it must be 2 to 256",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_cached_requests": -1}',
            "suffix_decoding_max_cached_requests is -1",
        ),
        (
            '{"method": "suffix", "suffix_decoding_corpus_tokens": 0}',
            "suffix_decoding_corpus_tokens is 0; it must be 1024 to",
        ),
        (
            '{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}',
            "suffix_decoding_min_token_prob is 1.5; it must be 0 to 1",
        ),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": "1"}', "suffix_decoding_max_spec_factor"),
    ],
)
def test_error_names_the_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config") as error:
        config_of(text)
    assert message in str(error.value)


def test_keys_of_suffix_decoding_have_defaults_of_vllm() -> None:
    config = config_of('{"method": "suffix"}')
    assert config == SpeculativeConfig(method="suffix", num_speculative_tokens=24)
    assert (
        config.suffix_decoding_max_tree_depth == 24 and config.suffix_decoding_max_cached_requests == 10_000
    )
    given = (
        '{"method": "suffix", "suffix_decoding_max_tree_depth": 64, "suffix_decoding_max_cached_requests": 5,'
        ' "suffix_decoding_corpus_tokens": 2048, "suffix_decoding_max_spec_factor": 2,'
        ' "suffix_decoding_min_token_prob": 0.25}'
    )
    assert config_of(given) == SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=32,
        suffix_decoding_max_tree_depth=64,
        suffix_decoding_max_cached_requests=5,
        suffix_decoding_corpus_tokens=2048,
        suffix_decoding_max_spec_factor=2.0,
        suffix_decoding_min_token_prob=0.25,
    )


@pytest.mark.parametrize("method", MTP_ALIASES)
def test_names_of_vllm_for_a_family_mean_mtp(method: str) -> None:
    config = config_of(f'{{"method": "{method}", "num_speculative_tokens": 1}}')
    assert config is not None and config.method == "mtp"


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "eagle"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("AngelSlim/Qwen3-8B_eagle3", "eagle3"),
        ("Qwen/Qwen3-0.6B", "draft_model"),
    ],
)
def test_names_of_heads_give_the_method_as_in_vllm(model: str, method: str) -> None:
    config = config_of(f'{{"model": "{model}", "num_speculative_tokens": 5}}')
    assert config is not None and config.method == method


@pytest.mark.parametrize("model", ["baidu/ERNIE-4.5-21B-A3B-PT", ""])
def test_the_model_of_mtp_may_be_the_served_one(model: str) -> None:
    text = f'{{"method": "ernie_mtp", "model": "{model}", "num_speculative_tokens": 1}}'
    served = "baidu/ERNIE-4.5-21B-A3B-PT"
    assert config_of(text, model=served) == config_of('{"method": "mtp", "num_speculative_tokens": 1}')
    parsed = speculation(dataclasses.replace(Options(model=served), speculative_config=text))
    assert parsed is not None and parsed.model is None


def test_layouts_and_devices_without_support_are_refused() -> None:
    text = '{"num_speculative_tokens": 4}'
    assert config_of(text, tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2) is not None
    model, mtp = (
        '{"num_speculative_tokens": 4, "model": "x"}',
        '{"method": "mtp", "num_speculative_tokens": 4}',
    )
    for layout in ("tensor_parallel_size", "pipeline_parallel_size"):
        for each in (model, mtp):
            assert config_of(each, **{layout: 2}) == config_of(each, nnodes=2, **{layout: 2}) is not None
    medusa = '{"method": "medusa", "num_speculative_tokens": 4, "model": "x"}'
    for each in (text, model, mtp, medusa):
        on_gpus = Options(speculative_config=each, tensor_parallel_size=2)
        assert speculative_config(on_gpus, "torch", "cuda") is not None
    with pytest.raises(ConfigError, match="--executor mock"):
        speculative_config(Options(speculative_config=text), "mock", "cpu")
    integers = '{"num_speculative_tokens": 4, "model": "x", "quantization": "int8"}'
    with pytest.raises(ConfigError, match="quantization int8 is only supported on the CPU"):
        speculative_config(Options(speculative_config=integers), "torch", "cuda")
    torch_kernels = Options(speculative_config=text, allow_torch_kernels=True)
    with pytest.raises(ConfigError, match="not supported with --allow-torch-kernels"):
        speculative_config(torch_kernels, "torch", "cuda")


def test_notes_on_a_gpu() -> None:
    options = Options(speculative_config='{"num_speculative_tokens": 4}')
    assert notes_on_device(options, "cpu") == []
    (note,) = notes_on_device(options, "cuda")
    assert "without --batch-invariant" in note
    assert notes_on_device(dataclasses.replace(options, batch_invariant=True), "cuda") == []


def test_models_without_drafts_on_a_gpu_are_refused() -> None:
    options = Options(speculative_config='{"num_speculative_tokens": 4}')
    tokens = KvSpec([KvGroup("full", [0])], 1, 64, 16)
    states = KvSpec([KvGroup("full", [0]), KvGroup("state", [1])], 1, 64, 16)
    check_model(options, "cuda", tokens, "quintet")
    check_model(options, "cpu", states, "transformers")
    with pytest.raises(ConfigError, match="recurrent states"):
        check_model(options, "cuda", states, "quintet")
    with pytest.raises(ConfigError, match="models that transformers computes"):
        check_model(options, "cuda", tokens, "transformers")
