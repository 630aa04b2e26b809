"""Configuration for a GPU: sizes left to the device, GPU-only features, and rejected flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.deploy.config.model_folder import write_model
from tests.deploy.resolve.test_resolve import complaint, resolved


def test_gpu_kv_memory_is_left_to_the_device(tmp_path: Path) -> None:
    """Other memory use of the device and of a step is unknown: nothing is noted or shrunk."""
    folder = write_model(tmp_path)
    options: dict[str, Any] = {"executor": "torch", "device": "cuda", "load_format": "dummy"}
    config = resolved(folder, **options, gpu_memory_utilization=0.5).config
    assert (config.cache.memory_bytes, config.cache.gpu_memory_utilization) == (0, 0.5)
    assert config.model.max_model_len == 512
    assert config.scheduler.max_num_batched_tokens == 8192
    assert resolved(folder, **options, kv_cache_memory="64KiB").config.cache.memory_bytes == 64 << 10
    assert "--gpu-memory-utilization is 1.5" in complaint(folder, **options, gpu_memory_utilization=1.5)


def test_an_fp8_cache_is_half_as_large_on_any_device(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    options: dict[str, Any] = {"executor": "torch", "load_format": "dummy", "kv_cache_dtype": "fp8"}
    for device in ("cuda", "cpu"):
        config = resolved(folder, **options, device=device).config
        assert config.cache.dtype == "fp8"
        assert config.model.kv.bytes_per_token == 2 * 2 * 2 * 16


def test_experts_of_odd_widths_are_rejected_on_gpus(tmp_path: Path) -> None:
    changes = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    options: dict[str, Any] = {"executor": "torch", "load_format": "dummy", "dtype": "bfloat16"}
    odd = write_model(tmp_path / "odd", **changes, intermediate_size=100)
    words = complaint(odd, **options, device="cuda")
    assert "rows of 100 numbers" in words and "multiples of 8" in words and "--device cpu" in words
    resolved(odd, **options, device="cpu")
    resolved(odd, **(options | {"dtype": "float32"}), device="cuda")
    resolved(write_model(tmp_path / "even", **changes, intermediate_size=104), **options, device="cuda")


def test_attention_backend_is_for_gpus_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    options: dict[str, Any] = {"executor": "torch", "load_format": "dummy"}
    config = resolved(
        folder, **options, device="cuda", attention_backend="torch", batch_invariant=True
    ).config
    assert (config.executor.attention_backend, config.executor.batch_invariant) == ("torch", True)
    words = complaint(folder, **options, device="cpu", attention_backend="torch")
    assert "--attention-backend torch" in words and "--device cuda" in words
