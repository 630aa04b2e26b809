"""Checkpoints that say how keys and values are kept in fp8: their scales are found, and used as plain torch uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.executor.paged_requests import in_eighths
from tests.models.equal import WAYS, alone, furthest, in_every_way, load
from tests.models.kv_scales import SCALES, SCHEME, SECTION, with_scales
from tests.models.random_checkpoints import of_transformers
from tests.models.test_equal import made
from transformers.models.llama import modeling_llama

from quintet.deploy.resolve.build import resolve
from quintet.deploy.resolve.flags import Options
from quintet.executor.layers.attention import AttentionLayer, KvScales
from quintet.executor.ops.host_linear import linear_library
from quintet.executor.quant.kv_scales import read_kv_scales
from quintet.executor.weights.load import open_files
from quintet.wire.errors import ConfigError

needs_kernels = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")


@needs_kernels
def test_tokens_are_those_of_keys_and_values_that_torch_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = modeling_llama.eager_attention_forward

    def rounding(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        scales = SCALES[module.layer_idx]
        k, v = (in_eighths(x, scale).float() for x, scale in zip((k, v), scales, strict=True))
        return plain(module, q, k, v, *rest, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", rounding)
    expected = made(with_scales(of_transformers("LlamaConfig", num_hidden_layers=2)), tmp_path)
    loaded = load(tmp_path)
    assert loaded.config.cache.dtype == "fp8"
    outcome = alone(loaded, [each.prompt for each in expected])
    # Roundings of fp32 put a few numbers on the other side of a tie.
    assert furthest(outcome, expected) < 0.05
    assert outcome.outputs == [each.outputs for each in expected]
    for way, other in in_every_way(loaded, [each.prompt for each in expected], False, WAYS):
        assert other.outputs == outcome.outputs, way


def layers(count: int = 2, **more: Any) -> list[AttentionLayer]:
    return [
        AttentionLayer(index=i, num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, **more)
        for i in range(count)
    ]


def read(tmp_path: Path, tensors: dict[str, torch.Tensor], found: list[AttentionLayer]) -> list[KvScales]:
    save_file(tensors, tmp_path / "model.safetensors")
    read_kv_scales(open_files(tmp_path), found)
    return [layer.kv_scales for layer in found]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_scales_are_found_by_the_names_that_writers_give_them(key: str, value: str, tmp_path: Path) -> None:
    tensors = {
        f"model.layers.1.{key}": torch.tensor([0.5], dtype=torch.bfloat16),
        f"model.layers.1.{value}": torch.tensor(0.25),
        f"model.layers.7.{key}": torch.tensor(3.0),  # of a layer that the model has not
        "model.layers.0.self_attn.q_proj.output_scale": torch.tensor(3.0),
        "model.layers.0.mlp.down_proj.input_scale": torch.tensor(3.0),
    }
    assert read(tmp_path, tensors, layers()) == [KvScales(), KvScales(0.5, 0.25)]


def test_one_scale_may_be_of_both(tmp_path: Path) -> None:
    both = {"model.layers.0.self_attn.kv_scale": torch.tensor([0.5])}
    assert read(tmp_path, both, layers(1)) == [KvScales(0.5, 0.5)]
    latent = {"model.layers.0.self_attn.k_scale": torch.tensor([0.25])}
    assert read(tmp_path, latent, layers(1, values_in_keys=True, value_dim=8)) == [KvScales(0.25, 0.25)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(4), r"has the shape \[4\]; one scale for a layer is read: give --kv-cache-dtype int8"),
        (torch.tensor([0.0]), "is 0; a scale is a positive number"),
        (torch.tensor([torch.nan]), "is nan; a scale is a positive number"),
    ],
)
def test_what_is_no_scale_is_refused(value: torch.Tensor, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, {"model.layers.0.self_attn.k_scale": value}, layers(1))


AS_IT_SAYS = "keys and values are fp8, as the checkpoint says"


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (SECTION, AS_IT_SAYS),
        (
            {"quant_method": "compressed-tensors", **SECTION, "kv_cache_scheme": SCHEME | {"num_bits": 4}},
            "keys and values in floats of 4 bits, which is not read, so they keep the model's format: --kv-cache-dtype int4",
        ),
        (
            SECTION | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}},
            "floats of 8 bits, a scale for each head, which is not read, so they keep the model's format: --kv-cache-dtype int8",
        ),
        (
            SECTION | {"kv_cache_scheme": SCHEME | {"dynamic": True}},
            "floats of 8 bits, scales that follow from the input, which is not read",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, AS_IT_SAYS),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "keys and values in NVFP4, which is not read, so they keep the model's format: --kv-cache-dtype int4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
    ],
)
def test_the_checkpoint_says_how_keys_and_values_are_kept(
    section: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    is_fp8 = told == AS_IT_SAYS
    of_transformers("LlamaConfig", num_hidden_layers=1).make(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    card = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(card | {"quantization_config": section}))
    options = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "kv_cache_memory": "1MiB"}
    found = resolve(Options(**options), tmp_path / "run", http=False)  # type: ignore[arg-type]
    assert found.config.cache.dtype == ("fp8" if is_fp8 else "model")
    assert len(found.notes) == (told is not None) and (told is None or told in found.notes[0])
    asked = resolve(Options(**options, kv_cache_dtype="model"), tmp_path / "run", http=False)  # type: ignore[arg-type]
    assert asked.config.cache.dtype == "model" and not asked.notes
    once, twice = (each.config.model.kv.bytes_per_token for each in (found, asked))
    assert once * (4 if is_fp8 else 1) == twice  # of fp32
