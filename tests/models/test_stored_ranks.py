"""Checkpoints that are quantized already, divided over ranks: each reads its part of the codes, scales and zeros."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from bench import quantized, quantized_tools
from bench.quantized import Written
from tests.models.equal import WAYS, alone, in_every_way, load, logits_of
from tests.models.quantized import SETTINGS, write
from tests.models.ranks import config_of, in_ranks
from tests.models.test_formats import BY_ROW, W4

from quintet.executor.cards.share import Share
from quintet.executor.loading import load_model
from quintet.executor.ops.host_linear import linear_library
from quintet.executor.platforms.platform import open_platform
from quintet.wire.errors import ConfigError

pytestmark = pytest.mark.skipif(linear_library() is None, reason="the host kernels are not built")

PROMPTS = [[5, 17, 3, 99, 42, 7], [201, 9], list(range(3, 60, 2))]
IN_32 = W4 | {"group_size": 32}
FORMATS: dict[str, Written] = {
    "gptq": quantized.gptq(4, 32, symmetric=True),
    "awq": quantized.awq(32),
    "compressed-tensors": quantized.compressed(IN_32, "pack-quantized"),
    "squeezellm": quantized_tools.squeezellm(4),
}
MORE_FORMATS: dict[str, Written] = {
    "gptq, zeros": quantized.gptq(4, 32, symmetric=False),
    "gptq, 2 bits": quantized.gptq(2, 32, symmetric=False),
    "gptq, 3 bits": quantized.gptq(3, 32, symmetric=True),
    "gptq, 8 bits, one group": quantized.gptq(8, 0, symmetric=True),
    "gptq, second version": quantized.gptq(4, 32, symmetric=False, version=2),
    "awq, gemv": quantized.awq(16, "gemv"),
    "squeezellm, 3 bits, tables alone": quantized_tools.squeezellm(3, outliers=False),
    "compressed-tensors, zeros": quantized.compressed(IN_32 | {"symmetric": False}, "pack-quantized"),
    "compressed-tensors, a row": quantized.compressed(BY_ROW, "pack-quantized"),
    "compressed-tensors, bytes": quantized.compressed(BY_ROW, "int-quantized"),
    "compressed-tensors, bytes, zeros": quantized.compressed(BY_ROW | {"symmetric": False}, "int-quantized"),
    "compressed-tensors, fp8": quantized.compressed(
        {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        "float-quantized",
        tensors=quantized.eight_bit_floats("weight_scale", (1, 0)),
    ),
    "compressed-tensors, nvfp4": quantized.compressed(
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        "nvfp4-pack-quantized",
        tensors=quantized.four_bit_floats(16, global_scale="weight_global_scale"),
    ),
}
FEW_WAYS = {way: WAYS[way] for way in ("together", "chunks, prefix hits")}
WIDE = {"intermediate_size": 256, "hidden_size": 256, "num_attention_heads": 8}
"""So that the inputs of two ranks, and of four, are whole groups of 32."""


def wide(**settings: int) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**(SETTINGS | WIDE | settings))  # type: ignore[arg-type]


def check(written: Written, size: int, folder: Path) -> None:
    """The tokens are one process's, however they are computed, and the logits differ by what another order of sums rounds."""
    ours, _ = write(folder, written, wide())
    expected = alone(load(ours), PROMPTS)
    with in_ranks(ours, size) as loaded:
        found = alone(loaded, PROMPTS)
        for way, outcome in in_every_way(loaded, PROMPTS, False, FEW_WAYS):
            assert outcome.outputs == expected.outputs, way
    for i, prompt in enumerate(PROMPTS):
        own, others = (logits_of(each, i, len(prompt)) for each in (found, expected))
        # Weights are equal; activations of integer weights have 16 bits in each group of inputs, so where sums in another order
        # round otherwise, it is by a step of 1 / 32639 of its largest number, through two layers.
        assert float((own - others).abs().max() / others.std()) < 1e-3


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    check(FORMATS[name], 2, tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS | MORE_FORMATS)
def test_and_so_are_those_of_each_variant(name: str, size: int, tmp_path: Path) -> None:
    """Four ranks: two of them have the rows of the same keys and values."""
    if name == "awq, gemv" and size == 4:
        pytest.skip("zeros of four of its groups are no whole word; that is refused below")
    check((FORMATS | MORE_FORMATS)[name], size, tmp_path)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (quantized.gptq(4, 64, symmetric=True), "inputs 0 to 96, no whole groups of 64"),
        (quantized.awq(32, "gemv"), "whose codes are no whole words"),
        (quantized.bitsandbytes("nf4"), "stored as bitsandbytes are not divided yet, only gptq"),
    ],
    ids=["groups", "words", "formats"],
)
def test_inputs_that_no_rank_can_read_alone_are_refused(written: Written, words: str, tmp_path: Path) -> None:
    ours, _ = write(tmp_path, written, wide(intermediate_size=192))
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size 2: .* cannot be divided: .*{words}"):
        config_of(ours, 2, 1, "float32", "none", "auto", None, experts=False)


def test_an_order_of_inputs_is_found_out_when_it_is_loaded(tmp_path: Path) -> None:
    ours, _ = write(tmp_path, quantized.gptq(4, 32, symmetric=True, by_activations=True), wide())
    config = config_of(ours, 2, 1, "float32", "none", "auto", None, experts=False)
    with pytest.raises(ConfigError, match=r"layer '.*o_proj' .*order of activations.*--tensor-parallel-size"):
        load_model(config, open_platform(config.executor), share=Share(0, 2))
