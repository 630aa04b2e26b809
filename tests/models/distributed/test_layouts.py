"""With `--layout-invariant` one process, ranks and stages of ranks give the same bits of each logit, in every dtype.

fp32 shows every sum of another order. Rounded to bf16, logits of models as small as these may have the same bits without
the flag, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.distributed import layouts_of_rows as layouts
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import Dtype, alone, load, run
from tests.models.random_checkpoints import NUM_TOKENS, of_transformers, write_checkpoint
from tests.models.test_engine import changed
from tests.models.test_equal import ROWS, made

from quintet.wire.config import ActivationDtype, Quantization
from quintet.wire.params import SamplingParams

SIZES = (2, 4)
EXPERTS = ("mixtral", "gpt-oss, 4 bits")
STATES = ("lfm2", "mamba", "mamba2, one group, limits", "falcon h1, normed first", "qwen 3.5")


def check(
    name: str,
    folder: Path,
    dtype: Dtype,
    quantization: Quantization = "none",
    *,
    experts: bool = False,
    activations: ActivationDtype = "auto",
) -> None:
    """Run each prompt alone: other tests cover that its bits do not depend on the batch."""
    prompts = [each.prompt for each in made(ROWS[name], folder)]
    check_prompts(prompts, folder, dtype, quantization, experts=experts, activations=activations)


def check_prompts(
    prompts: list[list[int]],
    folder: Path,
    dtype: Dtype,
    quantization: Quantization,
    *,
    experts: bool,
    activations: ActivationDtype = "auto",
    sizes: tuple[int, ...] = SIZES,
) -> None:
    """Compare the layouts for a folder."""
    expected = alone(
        load(folder, dtype, quantization, layout_invariant=True, activation_dtype=activations), prompts
    )
    switches = {"invariant": True, "activation_dtype": activations}
    for size in sizes:
        with in_ranks(folder, size, dtype, quantization, experts=experts, **switches) as loaded:
            found = alone(loaded, prompts)
        assert found.bits.keys() == expected.bits.keys()
        differing = [key for key, bits in found.bits.items() if bits != expected.bits[key]]
        assert not differing, (size, len(differing), len(found.bits), differing[:3])


@pytest.mark.parametrize(
    ("quantization", "activations"), [("none", "auto"), ("int4", "auto"), ("int4", "int8")]
)
def test_ranks_have_the_bits_of_one_process(
    quantization: Quantization, activations: ActivationDtype, tmp_path: Path
) -> None:
    """With four ranks two of them keep the same KV head."""
    check("llama", tmp_path, "float32", quantization, activations=activations)


def test_slices_equal_those_of_one_process(tmp_path: Path) -> None:
    """Inputs deep enough to be sliced: a rank's outputs alone would be sliced otherwise, the logits' the finest."""
    deep = {"hidden_size": 1024, "head_dim": 16, "intermediate_size": 2048, "vocab_size": 2400}
    write_checkpoint(of_transformers("LlamaConfig", **deep, num_hidden_layers=1), tmp_path)
    check_prompts([list(range(1, length)) for length in (2, 40)], tmp_path, "float32", "none", experts=False)


@pytest.mark.whole
def test_eight_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Each rank has one of eight leaves, and two ranks keep the same KV head."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    write_checkpoint(of_transformers("LlamaConfig", **heads), tmp_path)
    prompts = [list(range(1, length)) for length in (2, 40)]
    check_prompts(prompts, tmp_path, "float32", "none", experts=False, sizes=(2, 8))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", STATES)
def test_ranks_of_states_have_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, "float32")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", EXPERTS)
def test_ranks_of_whole_experts_have_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, "float32", experts=True)


@pytest.mark.whole
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize("name", ["llama", "mamba", "qwen 3.5"])
def test_scales_are_by_leaf(name: str, quantization: Quantization, tmp_path: Path) -> None:
    """Scales of columns and of tokens are those of a leaf, on every rank."""
    check(name, tmp_path, "float32", quantization)


@pytest.mark.whole
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", STATES)
def test_states_of_every_format_have_the_bits_of_one_process(name: str, dtype: Dtype, tmp_path: Path) -> None:
    check(name, tmp_path, dtype)


@pytest.mark.whole
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_experts_round_alike(quantization: Quantization, tmp_path: Path) -> None:
    check("mixtral", tmp_path, "float32", quantization, experts=True)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "experts"), layouts.INVARIANT.items())
def test_every_supported_family_has_the_bits_of_one_process(name: str, experts: bool, tmp_path: Path) -> None:
    check(name, tmp_path, "float32", experts=experts)


@pytest.mark.drawn(1)
def test_drawn_tokens_are_equal(tmp_path: Path) -> None:
    """So a request can resume in another layout."""
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]
    params = SamplingParams(temperature=1.1, top_p=0.9, seed=7, max_tokens=NUM_TOKENS, repetition_penalty=1.3)
    whole = load(tmp_path, "float32", layout_invariant=True)
    expected = run(whole, changed(whole.config), prompts, params=params)
    with in_ranks(tmp_path, 2, "float32", invariant=True) as loaded:
        assert run(loaded, changed(loaded.config), prompts, params=params).outputs == expected.outputs
