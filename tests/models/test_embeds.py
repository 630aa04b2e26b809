"""Prompt embeddings over the real core and worker: the embeddings of known tokens give the tokens' results, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.models import equality
from tests.models.kv.test_swapping import with_host_memory
from tests.models.random_checkpoints import write_checkpoint
from tests.models.rows import gpt, states
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.test_engine import GREEDY, CoreAndWorker, changed, small_kv, without_prefix_cache

from quintet.executor.backends.registry import make_worker
from quintet.wire.embeds import EmbedsPrompt, EmbedsSpan
from quintet.wire.params import SamplingParams


def vectors_of(table: torch.Tensor, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> EmbedsPrompt:
    """Return a prompt's rows of the model's embedding table."""
    rows = table.detach()[list(ids)].to(dtype).contiguous()
    name = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    return EmbedsPrompt(name, rows.shape[1], rows.view(torch.uint8).numpy().tobytes())


def mixed(table: torch.Tensor, prompts: list[list[int]]) -> list[list[int] | EmbedsPrompt]:
    """Return the prompts, every other one as vectors."""
    return [vectors_of(table, ids) if i % 2 else ids for i, ids in enumerate(prompts)]


def test_vectors_of_tokens_give_the_results_of_the_tokens(serve: Callable[..., Any]) -> None:
    """Next to prompts of ids; whole and in chunks, preempted, swapped, with and without the prefix cache."""
    served = serve(FAMILIES["llama-mqa-tied"](), max_model_len=96)
    prompts = prompts_of()
    expected = served.greedy(prompts, GREEDY.max_tokens)
    given = mixed(served.reference.get_input_embeddings().weight, prompts)
    config, worker = served.config, served.core.worker
    swapping = with_host_memory(small_kv(changed(config)))
    variants = {
        "together": (changed(config), worker),
        "chunks": (changed(config, max_num_batched_tokens=17, long_prefill_token_threshold=5), worker),
        "preemption": (without_prefix_cache(small_kv(changed(config, max_num_batched_tokens=13))), worker),
        "swapped": (swapping, make_worker(swapping)),
    }
    for name, (variant, executes) in variants.items():
        driver = CoreAndWorker(variant, executes)
        for i, prompt in enumerate(given):
            driver.admit(i + 1, prompt, GREEDY)
        driver.run()
        assert [driver.outputs[i + 1] for i in range(len(prompts))] == expected, name
        state = driver.engine.state
        assert state is not None and state.num_claims["prompt_embeds"] == 0
        assert (state.counters.preemptions > 0) == (name in {"preemption", "swapped"}), name


def with_spans(
    table: torch.Tensor, ids: list[int], spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[EmbedsSpan]]:
    """Return a prompt with some ranges as embeddings, and zeros as their ids."""
    given = [
        msgspec.structs.replace(vectors_of(table, ids[begin:end]).span, start=begin) for begin, end in spans
    ]
    hidden = {at for begin, end in spans for at in range(begin, end)}
    return [0 if at in hidden else token for at, token in enumerate(ids)], given


@pytest.mark.parametrize("spans", [[(17, 30)], [(0, 3), (16, 32), (35, 50)]], ids=["middle", "several"])
def test_spans_of_embeddings_give_the_results_of_their_tokens(
    spans: list[tuple[int, int]], serve: Callable[..., Any]
) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    table = served.reference.get_input_embeddings().weight
    [ids] = prompts_of((50,))
    outputs = []
    chunks = changed(served.config, max_num_batched_tokens=13, long_prefill_token_threshold=5)
    for config in (changed(served.config), chunks):
        driver = CoreAndWorker(config, served.core.worker)
        driver.admit(1, with_spans(table, ids, spans), GREEDY)
        driver.admit(2, ids, GREEDY)
        driver.run()
        outputs += [driver.outputs[1], driver.outputs[2]]
    assert outputs == [outputs[0]] * 4


def test_blocks_before_a_span_are_shared(serve: Callable[..., Any]) -> None:
    """A later block is shared only with requests of the same embeddings at the same positions."""
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    table = served.reference.get_input_embeddings().weight
    first, second = prompts_of((60, 60))
    driver = CoreAndWorker(changed(served.config), served.core.worker)
    other = first[:40] + second[40:50] + first[50:]
    requested: dict[int, Any] = {
        1: with_spans(table, first, [(40, 50)]),
        2: with_spans(table, other, [(40, 50)]),
        3: with_spans(table, first, [(40, 50)]),
        4: first,
        5: with_spans(table, first, [(41, 50)]),
    }
    for request_id, prompt in requested.items():
        driver.admit(request_id, prompt, GREEDY)
        driver.run()
    before, whole = (n // driver.block_size * driver.block_size for n in (40, 59))
    assert [driver.cached[request_id] for request_id in requested] == [0, before, whole, before, before]
    assert driver.outputs[1] == driver.outputs[3] == driver.outputs[4] == driver.outputs[5]


@pytest.mark.parametrize("row", [gpt.ROWS["gpt2"], states.ROWS["mamba2"]], ids=["positions", "states"])
def test_models_of_other_kinds(row: Any, tmp_path: Any) -> None:
    write_checkpoint(row, tmp_path)
    table = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    loaded = equality.load(tmp_path)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]
    outputs = []
    embedded = [vectors_of(table, ids, torch.float64) for ids in prompts]
    spans = [with_spans(table, ids, [(2, 4), (5, 6)]) for ids in prompts]
    for given in (list(prompts), embedded, spans):
        driver = CoreAndWorker(changed(loaded.config, max_num_batched_tokens=5, max_num_seqs=4))
        for i, prompt in enumerate(given):
            driver.admit(i + 1, prompt, GREEDY)
        driver.run()
        outputs.append(driver.outputs)
    assert outputs[0] == outputs[1] == outputs[2]


def test_embeds_are_shared_by_choices_only(serve: Callable[..., Any]) -> None:
    """Placeholder ids of vectors are zeros: neither a prompt of zeros nor other vectors may hit their blocks."""
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    table = served.reference.get_input_embeddings().weight
    first, second = prompts_of((50, 50))
    params = SamplingParams(n=3, temperature=0.9, max_tokens=8, seed=7)
    driver = CoreAndWorker(changed(served.config), served.core.worker)
    requested: dict[int, list[int] | EmbedsPrompt] = {
        10: vectors_of(table, first),
        20: [0] * 50,
        30: vectors_of(table, second),
        40: vectors_of(table, first),
        50: vectors_of(table, [*first[:-1], second[-1]]),
        60: first,
    }
    for request_id, prompt in requested.items():
        driver.admit(request_id, prompt, params)
        driver.run()
    whole = 49 // driver.block_size * driver.block_size
    assert [driver.cached[request_id] for request_id in requested] == [0, 0, 0, whole, 0, 0]
    for choice in range(3):
        assert driver.outputs[10 + choice] == driver.outputs[40 + choice] == driver.outputs[60 + choice]
    assert driver.outputs[10] != driver.outputs[30]


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
def test_repetition_penalty_ignores_vectors(serve: Callable[..., Any]) -> None:
    """As in transformers, which penalises generated tokens: placeholder ids of vectors are no tokens."""
    served = serve(FAMILIES["qwen2"](), max_model_len=96)
    table = served.reference.get_input_embeddings().weight
    [ids] = prompts_of((13,))
    expected = served.reference.generate(
        inputs_embeds=table.detach()[ids].unsqueeze(0),
        max_new_tokens=20,
        do_sample=False,
        repetition_penalty=1.5,
        eos_token_id=-1,
        pad_token_id=0,
    )
    driver = CoreAndWorker(changed(served.config), served.core.worker)
    driver.admit(
        1,
        vectors_of(table, ids),
        SamplingParams(temperature=0.0, max_tokens=20, seed=0, repetition_penalty=1.5),
    )
    driver.run()
    assert driver.outputs[1] == expected[0].tolist()


def test_numbers_beyond_the_dtype_saturate(serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES["llama-mha"](), max_model_len=96)
    width = served.reference.config.hidden_size
    huge = np.full((3, width), 1e300, np.float64)
    driver = CoreAndWorker(changed(served.config), served.core.worker)
    driver.admit(1, EmbedsPrompt("F64", width, huge.tobytes()), GREEDY)
    driver.run()
    assert len(driver.outputs[1]) == GREEDY.max_tokens
