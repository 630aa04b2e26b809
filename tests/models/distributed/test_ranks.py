"""Tensor parallelism gives the tokens of one process, and the same bits in every schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tests.models.distributed import layouts_of_rows as layouts
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import GREEDY, SCHEDULES, Dtype, alone, few_blocks, load, run, with_blocks
from tests.models.random_checkpoints import NUM_TOKENS
from tests.models.test_embeds import mixed
from tests.models.test_engine import CoreAndWorker, changed
from tests.models.test_equal import ROWS, check_bits, check_tokens, made

from quintet.wire.config import KvCacheDtype, Quantization
from quintet.wire.params import SamplingParams

FAST = (
    *("llama", "gpt2", "falcon 40b", "bloom", "mixtral"),
    *("lfm2", "mamba", "mamba2, one group, limits", "falcon h1, normed first", "qwen3 next", "qwen 3.5"),
)
"""Separate queries, keys and values; fused and transposed, with biases; by KV heads; with a slope for each head; experts.

Every kind of state: channels; channels that choose together; one group that is normed whole; next to attention; adjacent
heads in the checkpoint, and not.
"""
EXPERTS = ("mixtral", "gpt-oss", "gpt-oss, 4 bits")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAST)
def test_tokens_equal_those_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    """With four ranks two of them keep the same KV head, where there are two."""
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size) as loaded:
        check_tokens(loaded, ROWS[name], expected, {"preemption": SCHEDULES["preemption"]})


@pytest.mark.drawn(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EXPERTS)
def test_ranks_of_whole_experts_give_the_same_tokens(name: str, size: int, tmp_path: Path) -> None:
    """Experts in unequal numbers per rank, with biases, and microscaled."""
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, experts=True) as loaded:
        check_tokens(loaded, ROWS[name], expected, {"preemption": SCHEDULES["preemption"]})


@pytest.mark.whole
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "experts"),
    [*((name, False) for name in layouts.DIVIDED), *((name, True) for name in layouts.DIVIDED_BY_EXPERTS)],
)
def test_every_supported_family(name: str, experts: bool, size: int, tmp_path: Path) -> None:
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, experts=experts) as loaded:
        check_tokens(loaded, ROWS[name], expected, SCHEDULES)


@pytest.mark.whole
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "olmo2", "mixtral", "mamba", "falcon h1", "qwen 3.5"])
def test_bits_do_not_depend_on_batch_or_schedule(
    name: str, dtype: Dtype, kv: KvCacheDtype, size: int, tmp_path: Path
) -> None:
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, dtype, kv_cache_dtype=kv) as loaded:
        check_bits(loaded, [each.prompt for each in expected], SCHEDULES)


@pytest.mark.whole
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_quantized_weights_give_similar_logits(quantization: Quantization, tmp_path: Path) -> None:
    row = ROWS["llama"]
    expected = made(row, tmp_path)
    with in_ranks(tmp_path, 2, quantization=quantization) as loaded:
        outcome = alone(loaded, [each.prompt for each in expected])
    for i, each in enumerate(expected):
        first = torch.frombuffer(bytearray(outcome.bits[i, len(each.prompt)]), dtype=torch.float32)
        alike = float(torch.corrcoef(torch.stack([first, each.logits[0]]))[0, 1])
        assert alike > row.quantized[quantization == "int4"], (quantization, len(each.prompt), alike)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.1, top_p=0.9, seed=7, max_tokens=NUM_TOKENS, repetition_penalty=1.3),
    ],
    ids=["log-probabilities", "penalties"],
)
def test_requests_that_recompute_logits(params: SamplingParams, tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]
    whole = load(tmp_path)
    expected = run(whole, changed(whole.config), prompts, params=params)
    with in_ranks(tmp_path, 2) as loaded:
        assert run(loaded, changed(loaded.config), prompts, params=params).outputs == expected.outputs


def test_all_ranks_swap_blocks_and_accept_embeds(tmp_path: Path) -> None:
    """Every other prompt is given as embeddings; KV memory is too small for all, so blocks are swapped out and in."""
    expected = made(ROWS["llama"], tmp_path)
    table = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    prompts = mixed(table, [each.prompt for each in expected])
    with in_ranks(tmp_path, 2, swap_space=2**-10) as loaded:
        driver = CoreAndWorker(with_blocks(changed(loaded.config), few_blocks(loaded.config)), loaded.worker)
        for i, prompt in enumerate(prompts):
            driver.admit(i + 1, prompt, GREEDY)
        driver.run()
    assert [driver.outputs[i + 1] for i in range(len(prompts))] == [each.outputs for each in expected]
    assert driver.engine.state is not None and driver.engine.state.counters.swap_in_blocks > 0
