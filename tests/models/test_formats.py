"""Quantized checkpoints of others: what they say is what the model of their numbers says, however requests are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models import quantized
from tests.models.equal import WAYS, Loaded, alone, in_every_way, load, logits_of, one_torch_thread
from tests.models.quantized import Written

from quintet.executor.ops.host_linear import linear_library
from quintet.wire.errors import ConfigError

pytestmark = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")

PROMPTS = [[5, 17, 3, 99, 42, 7], [201, 9], list(range(3, 60, 2))]

FORMATS: dict[str, Written] = {
    "gptq": quantized.gptq(4, 64, symmetric=True),
    "awq": quantized.awq(64),
}
MORE_FORMATS: dict[str, Written] = {
    "gptq, 2 bits": quantized.gptq(2, 32, symmetric=False),
    "gptq, 3 bits": quantized.gptq(3, 32, symmetric=True),
    "gptq, 8 bits": quantized.gptq(8, 0, symmetric=True),
    "gptq, 8 bits, zeros": quantized.gptq(8, 32, symmetric=False),
    "gptq, one group": quantized.gptq(4, 0, symmetric=False),
    "gptq, ordered": quantized.gptq(4, 32, symmetric=True, by_activations=True),
    "gptq, second version": quantized.gptq(4, 128, symmetric=False, version=2),
    "awq, gemv": quantized.awq(64, "gemv"),
    "awq, gemv, groups of 32": quantized.awq(32, "gemv"),
}


SOME_WAYS = {name: WAYS[name] for name in ("together", "chunks, prefix hits")}


def compare(folder: Path, written: Written, config: transformers.PretrainedConfig | None = None) -> Loaded:
    """See that both checkpoints say the same, and that the quantized one says it in every way with the same bits."""
    ours, plain = quantized.write(folder, written, config)
    loaded = load(ours)
    assert loaded.config.executor.quantization == written.section["quant_method"]
    with one_torch_thread():
        its, expected = alone(loaded, PROMPTS), alone(load(plain), PROMPTS)
        for i, prompt in enumerate(PROMPTS):
            said, should = (logits_of(each, i, len(prompt))[0] for each in (its, expected))
            apart = float((said - should).abs().max() / should.std())
            # Weights are equal; activations of integer weights have 16 bits in each group of inputs: half a step of
            # 1 / 32639 of its largest number, through two layers.
            assert apart < 1e-3, (i, apart)
        for way, outcome in in_every_way(loaded, PROMPTS, watched=True, ways=SOME_WAYS):
            assert outcome.outputs == its.outputs, way
            assert outcome.bits.items() <= its.bits.items(), way
    return loaded


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_is_the_model_of_its_numbers(name: str, tmp_path: Path) -> None:
    compare(tmp_path, FORMATS[name])


@pytest.mark.whole
@pytest.mark.parametrize("name", MORE_FORMATS)
def test_and_so_is_each_variant(name: str, tmp_path: Path) -> None:
    compare(tmp_path, MORE_FORMATS[name])


EXPERTS = transformers.Qwen3MoeConfig(
    **quantized.SETTINGS,  # type: ignore[arg-type]
    moe_intermediate_size=64,
    num_experts=6,
    num_experts_per_tok=2,
    tie_word_embeddings=True,
)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_experts_are_read_as_other_layers(name: str, tmp_path: Path) -> None:
    compare(tmp_path, FORMATS[name], EXPERTS)


def change(folder: Path, change_card: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    """Change a checkpoint; None takes a tensor away."""
    path = folder / "config.json"
    card = json.loads(path.read_bytes())
    card["quantization_config"] |= change_card
    path.write_text(json.dumps(card))
    there = load_file(folder / "model.safetensors") | tensors
    save_file({name: each for name, each in there.items() if each is not None}, folder / "model.safetensors")


def test_what_a_checkpoint_and_the_flag_say_must_agree(tmp_path: Path) -> None:
    ours, plain = quantized.write(tmp_path, FORMATS["gptq"])
    load(ours, quantization="gptq")
    with pytest.raises(ConfigError, match=r"--quantization int8, but .*gptq: 4 bits, groups of 64"):
        load(ours, quantization="int8")
    with pytest.raises(ConfigError, match=r"--quantization gptq is a format of checkpoints"):
        load(plain, quantization="gptq")
    with pytest.raises(ConfigError, match="no tensor of the checkpoint ends with 'qweight'"):
        card = json.loads((plain / "config.json").read_bytes())
        (plain / "config.json").write_text(
            json.dumps(card | {"quantization_config": FORMATS["gptq"].section})
        )
        load(plain)


def test_older_tools_wrote_a_file_of_its_own(tmp_path: Path) -> None:
    ours, _ = quantized.write(tmp_path, FORMATS["gptq"])
    card = json.loads((ours / "config.json").read_bytes())
    section = card.pop("quantization_config")
    section.pop("quant_method")
    (ours / "config.json").write_text(json.dumps(card))
    (ours / "quantize_config.json").write_text(json.dumps(section))
    assert load(ours).config.executor.quantization == "gptq"


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("card", "tensors", "words"),
    [
        ({}, {f"{LAYER}.scales": None}, rf"'{LAYER}\.scales' \[3, 128\] is missing"),
        (
            {},
            {f"{LAYER}.qweight": torch.zeros(24, 127, dtype=torch.int32)},
            r"has shape \[24, 127\].*asks for \[24, 128\]",
        ),
        ({}, {f"{LAYER}.qweight": torch.zeros(24, 128)}, "number format F32; it must be one of I32"),
        (
            {},
            {f"{LAYER}.qzeros": torch.zeros(3, 16, dtype=torch.int32)},
            f"layer '{LAYER}'.*zeros other than 8",
        ),
        ({}, {f"{LAYER}.more": torch.zeros(2)}, f"'{LAYER}.more'.*has no place for"),
        ({}, {f"{LAYER}.bias": torch.ones(128)}, f"layer '{LAYER}'.*a bias of it"),
        ({"bits": 5}, {}, r"quantization_config\.bits is 5; it must be 2, 3, 4 or 8"),
        ({"group_size": 0}, {}, "group_size is 0; it must be -1 or a number of columns"),
        ({"checkpoint_format": "marlin"}, {}, "'marlin'.*take the one it was made from"),
        ({"dynamic": {"-:(a+)+$": {}}}, {}, "repeats no group"),
        ({"quant_method": "gptqq"}, {}, "the nearest that loads is 'gptq'"),
    ],
)
def test_what_does_not_load_is_one_line(
    card: dict[str, Any], tensors: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    ours, _ = quantized.write(tmp_path, FORMATS["gptq"])
    change(ours, card, tensors)
    with pytest.raises(ConfigError, match=words) as caught:
        load(ours)
    assert "\n" not in str(caught.value)


def test_a_bias_of_zeros_is_none(tmp_path: Path) -> None:
    ours, _ = quantized.write(tmp_path, FORMATS["gptq"])
    change(ours, {}, {f"{LAYER}.bias": torch.zeros(128)})
    load(ours)
