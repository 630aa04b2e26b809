"""Packed GGUF weights: the tokens of the dequantized model, and the same bits in every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quintet.executor.backends.cpu.ops.host_linear import WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight
from quintet.executor.checkpoints.gguf.blocks.dequantize import PLAIN
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.executor.checkpoints.gguf.types import BY_NAME
from quintet.executor.checkpoints.quant import gguf as gguf_quantization
from quintet.executor.checkpoints.quant.blocks import PACKED_FORMATS
from quintet.executor.checkpoints.quant.formats.registry import gguf_of
from quintet.executor.checkpoints.weights.header import Entry
from quintet.wire.errors import ConfigError
from tests.gguf.files import write_model
from tests.gguf.random_blocks import SCALES, WIDENED, in_blocks, of_gpt_oss
from tests.models.equality import SCHEDULES, alone, load, max_difference
from tests.models.random_checkpoints import of_transformers
from tests.models.rows import moe
from tests.models.test_equal import check_bits, check_quantized, made

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
CLOSE = 3e-3
"""Maximum error of logits against the dequantized model, in standard deviations: activations are integers of 16 bits."""


@pytest.mark.drawn(5)
@pytest.mark.parametrize("kind", SCALES)
def test_packed_blocks_are_dequantized_exactly(kind: str, tmp_path: Path) -> None:
    row = in_blocks(of_transformers("LlamaConfig", **WIDE), lambda name: kind, tmp_path / "model.gguf")
    expected = made(row, tmp_path)
    loaded = load(tmp_path / "model.gguf")
    assert loaded.config.executor.quantization == "gguf"
    outcome = alone(loaded, [each.prompt for each in expected])
    assert max_difference(outcome, expected) < CLOSE
    assert outcome.outputs == [each.outputs for each in expected]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", WIDENED)
def test_blocks_without_a_packed_form_are_dequantized_exactly(kind: str, tmp_path: Path) -> None:
    """In the model's dtype fp32 nothing is rounded."""
    row = in_blocks(of_transformers("LlamaConfig", **WIDE), lambda name: kind, tmp_path / "model.gguf")
    expected = made(row, tmp_path)
    loaded = load(tmp_path / "model.gguf")
    assert loaded.config.executor.quantization == "gguf"
    assert alone(loaded, [each.prompt for each in expected]).outputs == [each.outputs for each in expected]


@pytest.mark.parametrize("kind", [each for each in BY_NAME if each not in PLAIN])
def test_estimated_bytes_equal_the_loaded_bytes(kind: str) -> None:
    type_, (rows, depth) = BY_NAME[kind], (512, 2048)
    entry = Entry(kind, (rows, depth), 0, type_.num_bytes(rows * depth))
    estimated = gguf_of((kind,)).memory_bytes({"q": entry}, 2)
    library, numbers = linear_library(), PACKED_FORMATS.get(kind)
    if numbers is None:
        assert estimated == rows * depth * 2
    elif library is not None:
        group = 0 if numbers.weight_format.has_own_group else numbers.group
        packed = PackedWeight(library, numbers.weight_format, rows, depth, group=group)
        assert estimated == packed.memory.numel() - 4 * rows  # a scale of 1 for each output


def as_q4_k_m(name: str) -> str:
    """Return the types of a usual file: larger ones for values and downs in some layers, and for the output layer."""
    if name.startswith("blk.0.") and name.split(".")[2] in ("attn_v", "ffn_down"):
        return "Q6_K"
    return "Q6_K" if name.startswith(("output", "token_embd")) else "Q4_K"


@pytest.mark.parametrize("tied", [False, True])
def test_layers_of_mixed_types_have_the_same_bits_in_every_batch(tied: bool, tmp_path: Path) -> None:
    family = of_transformers("Qwen2Config", tie_word_embeddings=tied, **WIDE)
    expected = made(in_blocks(family, as_q4_k_m, tmp_path / "model.gguf"), tmp_path)
    loaded = load(tmp_path / "model.gguf")
    outcome = alone(loaded, [each.prompt for each in expected])
    assert max_difference(outcome, expected) < CLOSE
    assert outcome.outputs == [each.outputs for each in expected]
    check_bits(load(tmp_path / "model.gguf", "bfloat16"), [each.prompt for each in expected], SCHEDULES)


def _stacks(name: str) -> str:
    """Return types of queries, keys and values: all different, the first two equal, or one in floating point."""
    layer, _, tensor = name.removeprefix("blk.").partition(".")
    of_stack = {"0": ("Q4_K", "Q5_0", "Q6_K"), "1": ("Q8_0", "Q8_0", "F32")}.get(layer)
    stacked = ("attn_q.weight", "attn_k.weight", "attn_v.weight")
    return of_stack[stacked.index(tensor)] if of_stack and tensor in stacked else "Q4_K"


def test_each_type_of_a_fused_layer_is_packed_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    fill = PackedWeight.fill_blocks

    def counting(self: PackedWeight, raw: torch.Tensor, first_column: int = 0) -> None:
        filled.append((self.format, self.columns))
        fill(self, raw, first_column)

    monkeypatch.setattr(PackedWeight, "fill_blocks", counting)
    file, cache = tmp_path / "model.gguf", str(tmp_path / "cache")
    expected = made(in_blocks(of_transformers("Qwen2Config", **WIDE), _stacks, file), tmp_path)
    prompts = [each.prompt for each in expected]
    loaded = load(file, packed_cache=cache)
    assert {WeightFormat.Q5_0, WeightFormat.Q6_K} <= {each for each, _ in filled}
    outcome = alone(loaded, prompts)
    assert max_difference(outcome, expected) < CLOSE
    assert outcome.outputs == [each.outputs for each in expected]
    by_torch = alone(load(file, compiled=False), prompts)
    assert max_difference(by_torch, expected) < CLOSE
    assert by_torch.outputs == outcome.outputs
    filled.clear()
    assert alone(load(file, packed_cache=cache), prompts).bits == outcome.bits
    assert not filled, "packed blocks must not be packed again"
    check_bits(load(file, "bfloat16"), prompts, SCHEDULES)


def _gates(name: str) -> str:
    """Return types of gates and ups: two in one layer, one in the next, floating point in the third."""
    layer, _, tensor = name.removeprefix("blk.").partition(".")
    kinds = {"ffn_gate.weight": ("Q4_K", "Q8_0", "F32"), "ffn_up.weight": ("Q6_K", "Q8_0", "Q5_K")}
    return kinds[tensor][int(layer)] if tensor in kinds else "Q4_K"


def test_gates_and_ups_of_different_types_are_packed_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    fill = PackedWeight.fill_blocks

    def counting(self: PackedWeight, raw: torch.Tensor, first_column: int = 0) -> None:
        filled.append(self.format)
        fill(self, raw, first_column)

    monkeypatch.setattr(PackedWeight, "fill_blocks", counting)
    family = of_transformers("Qwen3Config", head_dim=64, **WIDE | {"num_hidden_layers": 3})
    expected = made(in_blocks(family, _gates, tmp_path / "model.gguf"), tmp_path)
    prompts = [each.prompt for each in expected]
    for compiled in (True, False):
        filled.clear()
        outcome = alone(load(tmp_path / "model.gguf", compiled=compiled), prompts)
        assert {WeightFormat.Q6_K, WeightFormat.Q5_K} <= set(filled)
        assert max_difference(outcome, expected) < CLOSE
        assert outcome.outputs == [each.outputs for each in expected]
    check_bits(load(tmp_path / "model.gguf", "bfloat16"), prompts, SCHEDULES)


def test_experts_are_packed(tmp_path: Path) -> None:
    """The logits of a Q8_0 file are close to the original ones."""
    expected = made(
        of_transformers("MixtralConfig", num_local_experts=4, num_experts_per_tok=4, **WIDE), tmp_path
    )
    write_model(tmp_path, tmp_path / "model.gguf", "q8_0")
    outcome = alone(load(tmp_path / "model.gguf"), [each.prompt for each in expected])
    for i, each in enumerate(expected):
        first = torch.frombuffer(bytearray(outcome.bits[i, len(each.prompt)]), dtype=torch.float32)
        assert torch.corrcoef(torch.stack([first, each.logits[0]]))[0, 1] > 0.99


_STACKED = {
    "experts with biases": of_transformers(
        "GptOssConfig", **moe.GPT_OSS | WIDE | {"swiglu_limit": 7.0, "intermediate_size": 256}
    ),
    "experts of gates and ups in one": of_transformers("GraniteMoeConfig", **moe.GRANITE | WIDE),
    "queries, keys and values in one, gates and ups in one": of_transformers(
        "Phi3Config", pad_token_id=0, **WIDE
    ),
    "grouped queries, keys and values": of_transformers("GPTNeoXConfig", **WIDE),
}
"""Layers that checkpoints store fused in some order, and files store separately."""


def test_experts_of_gpt_oss_stay_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled, fill = [], PackedWeight.fill_blocks

    def counting(self: PackedWeight, raw: torch.Tensor, first_column: int = 0) -> None:
        filled.append(self.format)
        fill(self, raw, first_column)

    monkeypatch.setattr(PackedWeight, "fill_blocks", counting)
    family = _STACKED["experts with biases"]
    expected = made(of_gpt_oss(family, tmp_path / "model.gguf"), tmp_path)
    outcome = alone(load(tmp_path / "model.gguf"), [each.prompt for each in expected])
    assert set(filled) == {WeightFormat.MXFP4}
    assert max_difference(outcome, expected) < CLOSE
    assert outcome.outputs == [each.outputs for each in expected]


@pytest.mark.whole
@pytest.mark.parametrize("family", _STACKED)
def test_fused_layers_of_a_family_are_packed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of the file are packed, those of the embedding readable, with exact numbers."""
    filled, fill = [], PackedWeight.fill_blocks

    def counting(self: PackedWeight, raw: torch.Tensor, first_column: int = 0) -> None:
        filled.append(raw.numel())
        fill(self, raw, first_column)

    monkeypatch.setattr(PackedWeight, "fill_blocks", counting)
    prompts = [each.prompt for each in made(_STACKED[family], tmp_path)]
    write_model(tmp_path, tmp_path / "model.gguf", "q8_0")
    packed = load(tmp_path / "model.gguf")
    tensors = dict(read_parts(tmp_path / "model.gguf").tensors())
    blocks = {name: each.num_bytes for name, each in tensors.items() if each.type.name == "Q8_0"}
    assert sum(filled) == sum(blocks.values())
    outcome = alone(packed, prompts)
    monkeypatch.setattr(gguf_quantization, "PACKED_FORMATS", {})
    plain = alone(load(tmp_path / "model.gguf"), prompts)
    assert plain.outputs == outcome.outputs
    for key, bits in plain.bits.items():
        ours, its = (
            torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (outcome.bits[key], bits)
        )
        assert float((ours - its).abs().max() / its.std()) < CLOSE


def test_the_quantization_flag_rounds_a_file(tmp_path: Path) -> None:
    row = in_blocks(of_transformers("LlamaConfig", **WIDE), as_q4_k_m, tmp_path / "model.gguf")
    check_quantized(tmp_path / "model.gguf", row, made(row, tmp_path))


def test_another_quantization_of_a_file_is_rejected(tmp_path: Path) -> None:
    in_blocks(of_transformers("LlamaConfig", **WIDE), as_q4_k_m, tmp_path / "model.gguf").make(tmp_path)
    words = r"--quantization gptq, but the checkpoint is already quantized \(gguf: .*model\.gguf\)"
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / "model.gguf", quantization="gptq")
