"""Model implementation: native layers for known architectures, else transformers' layers with a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model, write_weights

from quintet.deploy.cli.plan import make_plan, plan_lines
from quintet.deploy.config.build import Resolution, resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import read_facts
from quintet.wire.errors import ConfigError

UNKNOWN = {"architectures": ["LlamoForCausalLM"]}
RUN_DIR = Path("/nowhere/quintet-test")


def resolved(folder: Path, **options: Any) -> Resolution:
    write_weights(folder / "model.safetensors", {"a": [4, 4]})
    return resolve(Options(**{"model": str(folder), "device": "cpu", **options}), RUN_DIR)


def complaint(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_known_architecture_is_native(tmp_path: Path) -> None:
    resolution = resolved(write_model(tmp_path))
    assert resolution.config.model.implementation == "quintet"
    assert not any("transformers" in note for note in resolution.notes)
    assert "implementation    quintet" in plan_lines(make_plan(resolution))


def test_unknown_architecture_uses_transformers_with_a_note(tmp_path: Path) -> None:
    resolution = resolved(write_model(tmp_path, **UNKNOWN))
    assert resolution.config.model.implementation == "transformers"
    (note,) = (note for note in resolution.notes if "transformers" in note)
    assert note.startswith(
        "Quintet does not implement LlamoForCausalLM (nearest supported architecture: Llam"
    )
    plan = make_plan(resolution)
    assert plan.implementation == "transformers"
    assert any(line.startswith("implementation    transformers") for line in plan_lines(plan))


def test_flag_overrides_the_choice(tmp_path: Path) -> None:
    requested = resolved(write_model(tmp_path / "a"), model_impl="transformers", trust_remote_code=True)
    assert (
        requested.config.model.implementation == "transformers" and requested.config.model.trust_remote_code
    )
    assert not any("transformers" in note for note in requested.notes)
    native = resolved(write_model(tmp_path / "b", **UNKNOWN), model_impl="quintet")
    assert native.config.model.implementation == "quintet"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int8"}, "--quantization int8 requires Quintet's implementation"),
        ({"activation_dtype": "int8"}, "--activation-dtype int8 requires Quintet's implementation"),
        ({"packed_cache": "packed"}, "--packed-cache packed requires Quintet's implementation"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 requires Quintet's implementation"),
    ],
)
def test_native_only_features_are_rejected(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in complaint(write_model(tmp_path, **UNKNOWN), **options)


def test_configs_of_models_without_kv(tmp_path: Path) -> None:
    message = complaint(write_model(tmp_path / "a", **UNKNOWN, is_encoder_decoder=True))
    assert "transformers cannot run it here: encoder-decoder" in message
    message = complaint(write_model(tmp_path / "b", **UNKNOWN, num_attention_heads=None))
    assert "has no num_attention_heads, n_head, n_heads" in message
    assert "Quintet does not implement LlamoForCausalLM (nearest supported architecture: Llam" in message
    message = complaint(write_model(tmp_path / "d", **UNKNOWN, max_position_embeddings=None))
    assert (
        "(nearest supported architecture: Llam" in message
        and "config.json has none of max_position_embeddings" in message
    )
    known = write_model(tmp_path / "c", is_encoder_decoder=True)
    message = complaint(known, model_impl="transformers")
    assert "Quintet implements LlamaForCausalLM, and transformers cannot run it here" in message


def test_kv_memory_is_read_from_common_config_keys(tmp_path: Path) -> None:
    inner = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
    text = inner | {"vocab_size": 77, "max_position_embeddings": 99}
    nested = write_model(tmp_path / "nested", **UNKNOWN, **dict.fromkeys(text), text_config=text)
    facts = read_facts(nested)
    assert [need and (need.num_kv_heads, need.key_dim) for need in facts.kv_needs] == [(1, 16)] * 2
    assert (facts.spec.vocab_size, facts.spec.reach) == (77, 99)
