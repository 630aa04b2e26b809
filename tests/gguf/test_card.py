"""The model configuration from a file's metadata: arbitrary metadata gives a model or a one-line error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.model.weights import read_weight_facts
from quintet.executor.checkpoints.gguf.architectures import ARCHITECTURES
from quintet.executor.checkpoints.gguf.header import GgufHeader, Tensor
from quintet.executor.checkpoints.gguf.hf_config import REFUSED, hf_config_of_gguf
from quintet.executor.checkpoints.gguf.parts import GgufParts, read_parts
from quintet.executor.checkpoints.gguf.types import TYPES
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES
from quintet.wire.errors import ConfigError
from tests.gguf.families import ROWS
from tests.gguf.files import write_model
from tests.models.random_checkpoints import write_checkpoint

KEYS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *(
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_epsilon",
    ),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.scale", "logit_scale"),
    *("rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    "rope.scale_linear",
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "residual_scale", "embedding_scale"),
    *("ssm.state_size", "ssm.inner_size", "ssm.time_step_rank", "ssm.conv_kernel", "ssm.group_count"),
    *(
        "nextn_predict_layers",
        "shortconv.l_cache",
        "use_parallel_residual",
        "attention.sliding_window_pattern",
    ),
)
SANE = st.sampled_from([1, 2, 4, 8, 16, 64, 128, 256])
WILD = st.one_of(
    SANE,
    st.integers(-(1 << 40), 1 << 63),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(0, 1 << 31), max_size=5).map(np.array),
    st.sampled_from(["linear", "yarn", "none"]),
)


def parsed(metadata: dict[str, Any], tensors: tuple[str, ...] = ("token_embd.weight",)) -> GgufParts:
    shapes = {name: Tensor(TYPES[0], (64, 8), 0, 2048) for name in tensors}
    return GgufParts((GgufHeader(Path("model.gguf"), 1 << 20, 0, metadata, shapes, b""),))


def _check(arch: str, values: dict[str, Any]) -> None:
    metadata = {f"{arch}.{key}": value for key, value in values.items()} | {"general.architecture": arch}
    try:
        hf_config = json.loads(hf_config_of_gguf(parsed(metadata)))
        FAMILIES[hf_config["architectures"][0]].read(HfConfig(hf_config, "model.gguf"))
    except ConfigError as error:
        assert str(error).startswith("model.gguf: ") and "\n" not in str(error)


_VALUES = st.dictionaries(st.sampled_from(KEYS), WILD) | st.fixed_dictionaries(dict.fromkeys(KEYS, SANE))


@settings(max_examples=150, deadline=None)
@given(arch=st.sampled_from(sorted(ARCHITECTURES)), values=_VALUES)
def test_any_metadata_is_a_model_or_a_one_line_error(arch: str, values: dict[str, Any]) -> None:
    _check(arch, values)


@pytest.mark.whole
@settings(max_examples=20_000, deadline=None)
@given(arch=st.sampled_from(sorted(ARCHITECTURES)), values=_VALUES)
def test_more_metadata_is_a_model_or_a_one_line_error(arch: str, values: dict[str, Any]) -> None:
    _check(arch, values)


def test_an_unsupported_architecture_is_named_with_the_supported_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unsupported GGUF architecture 'rwkv9'; supported: apertus, arcee, baichuan"
    ):
        hf_config_of_gguf(parsed({"general.architecture": "rwkv9"}))
    with pytest.raises(ConfigError, match=r"general\.architecture is None"):
        hf_config_of_gguf(parsed({}))


def test_every_architecture_of_gguf_is_supported_or_has_a_reason() -> None:
    named = set(gguf.MODEL_ARCH_NAMES.values())
    assert named == ARCHITECTURES.keys() | REFUSED.keys()
    assert not ARCHITECTURES.keys() & REFUSED.keys()
    documented = (Path(__file__).parents[2] / "docs/quantization.md").read_text()
    assert [name for name in REFUSED if f"`{name}`" not in documented] == []
    with pytest.raises(
        ConfigError, match="unsupported GGUF architecture 'rwkv7': its recurrent layers are not implemented"
    ):
        hf_config_of_gguf(parsed({"general.architecture": "rwkv7"}))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"attention.head_count_kv": 3}, "llama.attention.head_count_kv is 3; it must be a divisor of"),
        ({"rope.freq_base": "high"}, "llama.rope.freq_base is 'high'; it must be a number"),
        (
            {"expert_count": 4, "expert_used_count": 5},
            "llama.expert_used_count is 5; it must be an integer",
        ),
    ],
)
def test_errors_name_the_keys_of_the_file(wrong: dict[str, Any], expected: str) -> None:
    values = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    metadata = {f"llama.{key}": value for key, value in (values | wrong).items()}
    hf_config = json.loads(hf_config_of_gguf(parsed(metadata | {"general.architecture": "llama"})))
    with pytest.raises(ConfigError, match=rf"^model\.gguf: {re.escape(expected)}"):
        FAMILIES[hf_config["architectures"][0]].read(HfConfig(hf_config, "model.gguf"))


@pytest.mark.parametrize(
    ("values", "factor"),
    [
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 8.0}, 8.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scale_linear": 0.0}, None),
        ({}, None),
    ],
)
def test_linear_scaling_needs_no_type_and_has_an_older_key(
    values: dict[str, Any], factor: float | None
) -> None:
    usual = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4}
    metadata = {f"llama.{key}": value for key, value in (usual | values).items()}
    hf_config = json.loads(hf_config_of_gguf(parsed(metadata | {"general.architecture": "llama"})))
    expected = factor and {"rope_type": "linear", "factor": factor}
    assert hf_config.get("rope_scaling") == expected


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(ROWS["llama"], folder)
    write_model(folder, folder / "model.gguf", "f16")
    return folder / "model.gguf"


def test_model_facts_are_those_of_the_file(file: Path) -> None:
    facts = read_facts(file)
    assert (facts.architecture, facts.dtype, facts.spec.vocab_size) == ("LlamaForCausalLM", "float16", 211)
    assert facts.path == file and len(facts.kv_needs) == 3


def test_layers_for_prediction_are_not_counted(tmp_path: Path) -> None:
    """They are not read; `quintet plan` shows the memory of the others."""
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "glm4moe")
    writer.add_block_count(2)
    writer.add_uint32("glm4moe.nextn_predict_layers", 1)
    shapes = {
        "token_embd": (10, 8),
        "blk.0.attn_q": (8, 8),
        "blk.1.attn_q": (8, 8),
        "blk.1.nextn.eh_proj": (8, 16),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    facts = read_weight_facts(tmp_path / "model.gguf")
    assert (facts.num_parameters, facts.size_bytes) == (10 * 8 + 8 * 8, 4 * (10 * 8 + 8 * 8))


def test_model_impl_transformers_rejects_gguf(file: Path) -> None:
    with pytest.raises(ConfigError, match="--model-impl transformers does not support GGUF"):
        read_facts(file, model_impl="transformers")


def test_unexpected_tensors_are_rejected(file: Path) -> None:
    """Ignoring a bias would give a wrong model."""
    from tests.models.equality import load

    raw = file.read_bytes()
    changed = file.with_name("changed.gguf")
    changed.write_bytes(raw.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_xxxx.weight"))
    assert "blk.0.attn_xxxx.weight" in dict(read_parts(changed).tensors())
    with pytest.raises(ConfigError, match=r"unexpected tensor 'blk\.0\.attn_xxxx\.weight'"):
        load(changed)
