"""Quantized checkpoints divided over ranks: each rank reads its part of the codes, scales and zeros."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from bench.quantization import layers, more_layers
from bench.quantization.layers import Written
from tests.gguf.random_blocks import in_blocks
from tests.gguf.test_packed import as_q4_k_m
from tests.models.checkpoints.quantized import SETTINGS, write
from tests.models.checkpoints.test_formats import BY_ROW, W4
from tests.models.checkpoints.test_formats import MORE_FORMATS as FORMATS_OF_ONE
from tests.models.distributed.ranks import config_of, in_ranks
from tests.models.equality import SCHEDULES, alone, load, logits_of, run_schedules
from tests.models.random_checkpoints import of_transformers
from tests.models.test_equal import made

from quintet.executor.backends.cpu.ops.host_linear import linear_library
from quintet.executor.backends.platforms.platform import open_platform
from quintet.executor.loading import load_model
from quintet.executor.model_config.share import Share
from quintet.wire.errors import ConfigError

pytestmark = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")

PROMPTS = [[5, 17, 3, 99, 42, 7], [201, 9], list(range(3, 60, 2))]
IN_32 = W4 | {"group_size": 32}
FORMATS: dict[str, Written] = {
    "gptq": layers.gptq(4, 32, symmetric=True),
    "awq": layers.awq(32),
    "compressed-tensors": layers.compressed(IN_32, "pack-quantized"),
    "squeezellm": more_layers.squeezellm(4),
    "fp8": layers.fp8(block=True),
}
MORE_FORMATS: dict[str, Written] = {
    "gptq, zeros": layers.gptq(4, 32, symmetric=False),
    "gptq, 2 bits": layers.gptq(2, 32, symmetric=False),
    "gptq, 3 bits": layers.gptq(3, 32, symmetric=True),
    "gptq, 8 bits, one group": layers.gptq(8, 0, symmetric=True),
    "gptq, second version": layers.gptq(4, 32, symmetric=False, version=2),
    "awq, gemv": layers.awq(16, "gemv"),
    "squeezellm, 3 bits, tables alone": more_layers.squeezellm(3, outliers=False),
    "compressed-tensors, zeros": layers.compressed(IN_32 | {"symmetric": False}, "pack-quantized"),
    "compressed-tensors, a row": layers.compressed(BY_ROW, "pack-quantized"),
    "compressed-tensors, bytes": layers.compressed(BY_ROW, "int-quantized"),
    "compressed-tensors, bytes, zeros": layers.compressed(BY_ROW | {"symmetric": False}, "int-quantized"),
    "compressed-tensors, fp8": layers.compressed(
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        "float-quantized",
        tensors=layers.eight_bit_floats("weight_scale", (1, 0)),
    ),
    "compressed-tensors, nvfp4": layers.compressed(
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        "nvfp4-pack-quantized",
        tensors=layers.four_bit_floats(16, global_scale="weight_global_scale"),
    ),
} | {
    name: FORMATS_OF_ONE[name]
    for name in (
        *("fp8, one scale", "fp8, of fbgemm", "auto-round, fp8", "auto-round, nvfp4", "torchao, fp8"),
        *("quark", "quark, uint4", "quark, fp4", "modelopt", "modelopt, nvfp4", "torchao", "auto-round"),
    )
}  # fmt: skip
FEW_SCHEDULES = {schedule: SCHEDULES[schedule] for schedule in ("together", "chunks, prefix hits")}
OF_FILES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
WIDE = {"intermediate_size": 256, "hidden_size": 256, "num_attention_heads": 8}
"""Inputs of two ranks, and of four, are then whole groups of 32."""


def wide(**settings: int) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**(SETTINGS | WIDE | settings))  # type: ignore[arg-type]


def check(
    written: Written,
    size: int,
    folder: Path,
    config: transformers.PretrainedConfig | None = None,
    *,
    experts: bool = False,
) -> None:
    """Compare with one process: equal tokens in every schedule, and logits that differ by another order of sums."""
    ours, _ = write(folder, written, config or wide())
    expected = alone(load(ours), PROMPTS)
    with in_ranks(ours, size, experts=experts) as loaded:
        found = alone(loaded, PROMPTS)
        for schedule, outcome in run_schedules(loaded, PROMPTS, False, FEW_SCHEDULES):
            assert outcome.outputs == expected.outputs, schedule
    for i, prompt in enumerate(PROMPTS):
        own, others = (logits_of(each, i, len(prompt)) for each in (found, expected))
        # Weights are equal; activations of integer weights have 16 bits in each group of inputs. Sums in another order may
        # round otherwise, by a step of 1 / 32639 of the group's largest number, through two layers.
        assert float((own - others).abs().max() / others.std()) < 1e-3


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_equal_those_of_one_process(name: str, tmp_path: Path) -> None:
    check(FORMATS[name], 2, tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS | MORE_FORMATS)
def test_tokens_of_variants_equal_those_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    """With four ranks, two of them have the rows of the same keys and values."""
    if name == "awq, gemv" and size == 4:
        pytest.skip("zeros of four of its groups are no whole word; that is refused below")
    blocks = {"intermediate_size": 512, "hidden_size": 512} if name == "fp8" else {}
    check((FORMATS | MORE_FORMATS)[name], size, tmp_path, wide(**blocks))


EXPERTS = transformers.Qwen2MoeConfig(
    **SETTINGS | WIDE,  # type: ignore[arg-type]
    moe_intermediate_size=64,
    shared_expert_intermediate_size=256,
    num_experts=6,
    num_experts_per_tok=2,
)
LATENTS = transformers.DeepseekV3Config(
    **SETTINGS | WIDE | {"num_key_value_heads": 8, "first_k_dense_replace": 1},  # type: ignore[arg-type]
    moe_intermediate_size=64,
    n_routed_experts=6,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
STATES = transformers.BambaConfig(
    **SETTINGS | WIDE,  # type: ignore[arg-type]
    mamba_n_heads=8,
    mamba_d_head=64,
    mamba_n_groups=1,
    mamba_d_state=16,
    attn_layer_indices=[1],
)
FUSED = transformers.Phi3Config(**SETTINGS | WIDE)  # type: ignore[arg-type]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((EXPERTS, name) for name in ("gptq", "awq", "compressed-tensors", "fp8", "quark, fp4")),
        *((LATENTS, name) for name in ("compressed-tensors", "fp8")),
        *((STATES, name) for name in ("gptq", "compressed-tensors", "fp8")),
        *((FUSED, name) for name in ("gptq", "fp8")),
    ],
)
def test_other_kinds_of_layers_are_divided(
    config: transformers.PretrainedConfig, name: str, tmp_path: Path
) -> None:
    """Experts stay whole."""
    has_experts = config in (EXPERTS, LATENTS)
    check((FORMATS | MORE_FORMATS)[name], 2, tmp_path, config, experts=has_experts)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (layers.gptq(4, 64, symmetric=True), "inputs 0 to 96, not whole groups of 64"),
        (layers.awq(32, "gemv"), "not whole words of codes"),
        (layers.bitsandbytes("nf4"), "bitsandbytes weights cannot be sharded; supported formats: gptq"),
        (FORMATS_OF_ONE["torchao, 4 bits"], "tensors of this format cannot be divided"),
    ],
    ids=["groups", "words", "formats", "tensors"],
)
def test_indivisible_inputs_are_rejected(written: Written, words: str, tmp_path: Path) -> None:
    ours, _ = write(tmp_path, written, wide(intermediate_size=192))
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size 2: .* cannot be sharded: .*{words}"):
        config_of(ours, 2, 1, "float32", "none", "auto", None, experts=False)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (layers.gptq(4, 32, symmetric=True, by_activations=True), "by activation order"),
        (FORMATS_OF_ONE["modelopt, int4, factors"], "layers with input factors"),
    ],
    ids=["order", "factors"],
)
def test_order_or_factors_of_inputs_are_rejected_at_load(
    written: Written, words: str, tmp_path: Path
) -> None:
    ours, _ = write(tmp_path, written, wide())
    config = config_of(ours, 2, 1, "float32", "none", "auto", None, experts=False)
    with pytest.raises(ConfigError, match=rf"layer '.*o_proj' .*{words}.*--tensor-parallel-size"):
        load_model(config, open_platform(config.executor), share=Share(0, 2))


FILES = {
    "several types": (of_transformers("Qwen2Config", **OF_FILES), as_q4_k_m),
    "one matrix for ids and logits": (of_transformers("Qwen2Config", tie_word_embeddings=True, **OF_FILES), as_q4_k_m),
    "heads in another order": (of_transformers("LlamaConfig", **OF_FILES), as_q4_k_m),
    "experts": (
        of_transformers(
            "Qwen2MoeConfig", moe_intermediate_size=256, shared_expert_intermediate_size=512, num_experts=6,
            num_experts_per_tok=2, **OF_FILES,
        ),
        as_q4_k_m,
    ),
    "states": (
        of_transformers(
            "Mamba2Config", num_heads=8, head_dim=128, n_groups=1, state_size=16, hidden_size=512, num_hidden_layers=2,
        ),
        lambda name: "Q8_0",
    ),
}  # fmt: skip


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", FILES)
def test_gguf_file_is_divided(name: str, tmp_path: Path) -> None:
    """In whole blocks; experts stay whole."""
    family, kind_of = FILES[name]
    file = tmp_path / "model.gguf"
    expected = made(in_blocks(family, kind_of, file), tmp_path)
    with in_ranks(file, 2, experts=name == "experts") as loaded:
        for schedule, outcome in run_schedules(
            loaded, [each.prompt for each in expected], False, FEW_SCHEDULES
        ):
            assert outcome.outputs == [each.outputs for each in expected], schedule


def test_partial_blocks_are_rejected_at_load(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    family = of_transformers("Qwen2Config", **OF_FILES | {"intermediate_size": 768})
    made(in_blocks(family, as_q4_k_m, file), tmp_path)
    config = config_of(file, 2, 1, "float32", "none", "auto", None, experts=False)
    with pytest.raises(ConfigError, match=r"down_proj'.* inputs 0 to 384, not whole blocks of 256 \(Q6_K\)"):
        load_model(config, open_platform(config.executor), share=Share(0, 2))
