"""Checkpoints with fp8 KV scales: the reader finds them, and results equal those of plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.executor.kernels.paged_requests import in_eighths
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import SCHEDULES, alone, load, max_difference, run_schedules
from tests.models.kv.kv_scales import BY_HEAD, SCHEME, SECTION, scales_of, with_scales
from tests.models.random_checkpoints import Expectation, of_transformers
from tests.models.test_equal import made
from transformers.models.llama import modeling_llama

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.cpu.ops.host_linear import linear_library
from quintet.executor.checkpoints.quant.formats.kv_cache import wish_of
from quintet.executor.checkpoints.quant.kv_scales import read_kv_scales
from quintet.executor.checkpoints.weights.load import open_files
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.share import KeptRange
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.wire.errors import ConfigError

needs_kernels = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")


HEADS = 2


def rounded_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_heads: int) -> list[Expectation]:
    """Write a checkpoint with scales per layer or per head; return the tokens of torch that rounds with them."""
    plain = modeling_llama.eager_attention_forward

    def rounding(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        scales = scales_of(module.layer_idx, num_heads)
        k, v = (in_eighths(x, scale).float() for x, scale in zip((k, v), scales, strict=True))
        return plain(module, q, k, v, *rest, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", rounding)
    row = of_transformers("LlamaConfig", num_hidden_layers=2, num_key_value_heads=HEADS)
    return made(with_scales(row, num_heads), tmp_path)


@needs_kernels
@pytest.mark.parametrize("num_heads", [1, HEADS])
def test_tokens_equal_torch_with_rounded_kv(
    num_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rounded_in_torch(tmp_path, monkeypatch, num_heads)
    loaded = load(tmp_path)
    assert loaded.config.cache.dtype == "fp8"
    outcome = alone(loaded, [each.prompt for each in expected])
    # Roundings of fp32 put a few numbers on the other side of a tie.
    assert max_difference(outcome, expected) < 0.05
    assert outcome.outputs == [each.outputs for each in expected]
    for schedule, other in run_schedules(loaded, [each.prompt for each in expected], False, SCHEDULES):
        assert other.outputs == outcome.outputs, schedule


@needs_kernels
@pytest.mark.parametrize(("size", "context"), [(2, 1), (4, 1), (4, 2)])
def test_rank_reads_the_scales_of_its_heads(
    size: int, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four ranks have the same head, each with all of its keys and values or with a part of them."""
    expected = rounded_in_torch(tmp_path, monkeypatch, HEADS)
    with in_ranks(tmp_path, size, context=context) as loaded:
        assert loaded.config.cache.dtype == "fp8"
        assert alone(loaded, [each.prompt for each in expected]).outputs == [
            each.outputs for each in expected
        ]


@needs_kernels
def test_dynamic_scales_are_not_read(tmp_path: Path) -> None:
    of_transformers("LlamaConfig", num_hidden_layers=1).make(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    hf_config = json.loads((tmp_path / "config.json").read_text())
    section = SECTION | {"kv_cache_scheme": INT8 | {"strategy": "token", "dynamic": True}}
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"quantization_config": section}))
    assert load(tmp_path).config.cache.dtype == "int8"


def layers(count: int = 2, **more: Any) -> list[AttentionLayer]:
    settings = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "scale": 0.25} | more
    return [AttentionLayer(index=i, **settings) for i in range(count)]


Read = tuple[list[float] | None, list[float] | None]
"""Scales of a layer's keys, and of its values, per head; None: 1."""


def read(
    tmp_path: Path, tensors: dict[str, torch.Tensor], found: list[AttentionLayer], **how: bool
) -> list[Read]:
    save_file(tensors, tmp_path / "model.safetensors")
    read_kv_scales(open_files(tmp_path), found, **how)
    both = [(layer.kv_scales.key, layer.kv_scales.value) for layer in found]
    return [(None if k is None else k.tolist(), None if v is None else v.tolist()) for k, v in both]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_scales_are_found_under_the_names_of_each_tool(key: str, value: str, tmp_path: Path) -> None:
    tensors = {
        f"model.layers.1.{key}": torch.tensor([0.5], dtype=torch.bfloat16),
        f"model.layers.1.{value}": torch.tensor(0.25),
        f"model.layers.7.{key}": torch.tensor(3.0),  # of a layer that the model lacks
        "model.layers.0.self_attn.q_proj.output_scale": torch.tensor(3.0),
        "model.layers.0.mlp.down_proj.input_scale": torch.tensor(3.0),
    }
    assert read(tmp_path, tensors, layers()) == [(None, None), ([0.5], [0.25])]


def test_shared_scale_of_keys_and_values(tmp_path: Path) -> None:
    both = {"model.layers.0.self_attn.kv_scale": torch.tensor([0.5])}
    assert read(tmp_path, both, layers(1)) == [([0.5], [0.5])]
    latent = {"model.layers.0.self_attn.k_scale": torch.tensor([0.25])}
    assert read(tmp_path, latent, layers(1, values_in_keys=True, value_dim=8)) == [([0.25], [0.25])]


def test_layer_reads_the_scales_of_its_heads(tmp_path: Path) -> None:
    key, value = torch.tensor([0.5, 0.25, 2.0, 4.0]), torch.tensor([1.0])
    tensors = {
        "model.layers.0.self_attn.k_scale": key.view(4, 1, 1),
        "model.layers.0.self_attn.v_scale": value,
    }
    assert read(tmp_path, tensors, layers(1, num_heads=8, num_kv_heads=4)) == [(key.tolist(), [1.0] * 4)]
    kept = layers(1, num_heads=4, num_kv_heads=2, kept_kv_heads=KeptRange(2, 4, 4))
    assert read(tmp_path, tensors, kept) == [([2.0, 4.0], [1.0, 1.0])]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            torch.ones(4),
            r"has the shape \[4\]; one scale for a layer, or for each of its 3 heads, is supported: set --kv-cache-dtype int8",
        ),
        (torch.ones(1, 3, 3), r"has the shape \[1, 3, 3\]; one scale"),
        (torch.tensor([1.0, -2.0, 1.0]), "is -2, but a scale is a positive number"),
        (torch.tensor([0.0]), "is 0, but a scale is a positive number"),
        (torch.tensor([torch.nan]), "is nan, but a scale is a positive number"),
    ],
)
def test_invalid_scale_is_rejected(value: torch.Tensor, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, {"model.layers.0.self_attn.k_scale": value}, layers(1, num_heads=3, num_kv_heads=3))


def test_per_head_scales_are_rejected_by_per_layer_kernels(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.ones(3)}
    with pytest.raises(ConfigError, match=r"has the shape \[3\]; one scale for a layer is supported"):
        read(tmp_path, scales, layers(1, num_heads=3, num_kv_heads=3), by_head=False)


AS_IT_SAYS = "KV cache is fp8 as the checkpoint requests;"
IN_STEPS = "KV cache is int8 as the checkpoint requests, with a scale for each token and head"
INT8 = SCHEME | {"type": "int"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (SECTION, AS_IT_SAYS),
        (
            {"quant_method": "compressed-tensors", **SECTION, "kv_cache_scheme": SCHEME | {"num_bits": 4}},
            "KV cache in floats of 4 bits, which is not supported: it keeps the model's number format; the nearest is"
            " --kv-cache-dtype int4",
        ),
        (BY_HEAD, AS_IT_SAYS),
        (SECTION | {"kv_cache_scheme": SCHEME | {"strategy": None}}, AS_IT_SAYS),
        (SECTION | {"kv_cache_scheme": INT8}, IN_STEPS),
        (SECTION | {"kv_cache_scheme": INT8 | {"strategy": "attn_head"}}, IN_STEPS),
        (SECTION | {"kv_cache_scheme": INT8 | {"strategy": "token", "dynamic": True}}, IN_STEPS),
        (
            SECTION | {"kv_cache_scheme": INT8 | {"strategy": "channel"}},
            "ints of 8 bits, scales by channel, which is not supported: it keeps the model's number format; the nearest is"
            " --kv-cache-dtype int8",
        ),
        (
            SECTION | {"kv_cache_scheme": INT8 | {"symmetric": False}},
            "ints of 8 bits, zero points, which is not supported: it keeps the model's number format; the nearest is"
            " --kv-cache-dtype int8",
        ),
        (
            SECTION | {"kv_cache_scheme": SCHEME | {"dynamic": True}},
            "floats of 8 bits, run-time scales, which is not supported",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, AS_IT_SAYS),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "KV cache in NVFP4, which is not supported: it keeps the model's number format; the nearest is"
            " --kv-cache-dtype int4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, IN_STEPS),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
    ],
)
def test_checkpoint_determines_the_kv_dtype(
    section: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    stored, head_bytes = {AS_IT_SAYS: ("fp8", 16), IN_STEPS: ("int8", 16 + 4)}.get(
        message or "", ("model", 64)
    )
    of_transformers("LlamaConfig", num_hidden_layers=1).make(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    hf_config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"quantization_config": section}))
    options = {"model": str(tmp_path), "device": "cpu", "load_format": "dummy", "kv_cache_memory": "1MiB"}
    found = resolve(Options(**options), tmp_path / "run", http=False)  # type: ignore[arg-type]
    assert found.config.cache.dtype == stored
    assert len(found.notes) == (message is not None) and (message is None or message in found.notes[0])
    requested = resolve(Options(**options, kv_cache_dtype="model"), tmp_path / "run", http=False)  # type: ignore[arg-type]
    assert requested.config.cache.dtype == "model" and not requested.notes
    once, twice = (each.config.model.kv.bytes_per_token for each in (found, requested))
    assert once * 64 == twice * head_bytes  # of 16 numbers in fp32


@pytest.mark.parametrize(
    ("scheme", "stored", "message"),
    [
        (SCHEME, "fp8", AS_IT_SAYS),
        (
            SCHEME | {"strategy": "attn_head"},
            None,
            "floats of 8 bits, a scale for each head, which is not supported: it keeps the model's number format",
        ),
        (
            INT8,
            None,
            "ints of 8 bits, which is not supported: it keeps the model's number format; the nearest is"
            " --kv-cache-dtype fp8 (scales of 1",
        ),
    ],
)
def test_gpu_ignores_unsupported_kv_schemes(
    scheme: dict[str, Any], stored: str | None, message: str, tmp_path: Path
) -> None:
    wish = wish_of(HfConfig({"quantization_config": SECTION | {"kv_cache_scheme": scheme}}, "config.json"))
    assert wish is not None and wish.format_on("cuda") == stored
    assert message in wish.note("cuda")
