"""Heads with a folder of their own: drafts are those of a reference, and outputs are those without drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.speculation.draft_heads import (
    Head,
    eagle3_head,
    eagle_head,
    medusa_heads,
    record_drafts,
    with_head,
)
from tests.models.speculation.test_bits import PARAMS, drafting_worker, run
from tests.models.test_engine import CoreAndWorker, changed, small_kv, without_prefix_cache

from quintet.wire.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, seed=0)
EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "own embedding": {"own_embedding": True, "norm_before_residual": True},
    "token map": {"token_map": True, "norm_before_fc": True},
}
HEADS: dict[str, Callable[[], Head]] = {
    "eagle": eagle_head,
    "eagle of vllm, biases": lambda: eagle_head(biased=True, of_vllm=True),
    "eagle of speculators": lambda: eagle_head(speculators=True),
    "eagle of speculators, biases": lambda: eagle_head(biased=True, speculators=True),
    "medusa": medusa_heads,
    "medusa of vllm": lambda: medusa_heads(of_vllm=True),
    **{f"eagle3, {name}": lambda flags=flags: eagle3_head(**flags) for name, flags in EAGLE3.items()},
    **{
        f"eagle3 of speculators, {name}": lambda flags=flags: eagle3_head(speculators=True, **flags)
        for name, flags in EAGLE3.items()
    },
}
compiled = pytest.mark.parametrize("serve", [16], ids=["compiled"], indirect=True)


@compiled
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_reference(
    name: str, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]
) -> None:
    served, head = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96), HEADS[name]()
    config = with_head(served.config, tmp_path_factory.mktemp("head"), head)
    worker = drafting_worker(config)
    found = record_drafts(worker)
    driver = CoreAndWorker(changed(config, max_num_batched_tokens=40), worker)
    for index, prompt in enumerate(prompts_of((1, 8, 50))):
        driver.admit(index + 1, prompt, GREEDY)
    driver.run()
    driver.admit(9, prompts_of((1, 8, 50))[2], GREEDY)  # after a cached prefix
    driver.run()
    proposals = [each for each in found if each[1]]
    assert len(proposals) > 40
    for tokens, drafts in (*proposals[:20:4], *proposals[20::7], proposals[-1]):
        assert drafts == head.drafts(served.reference, tokens, len(drafts))


@compiled
@pytest.mark.parametrize("name", ["eagle", "medusa", "eagle3, plain"])
def test_logits_processors_apply_to_drafts(
    name: str, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]
) -> None:
    """Two tokens have a bias, and a penalty for each occurrence alternates them."""
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    config = with_head(served.config, tmp_path_factory.mktemp("head"), HEADS[name]())
    worker = drafting_worker(config)
    found = record_drafts(worker)
    driver = CoreAndWorker(config, worker)
    params = msgspec.structs.replace(GREEDY, logit_bias={7: 100.0, 9: 99.0}, frequency_penalty=2.0)
    driver.admit(1, prompts_of((8,))[0], params)
    driver.run()
    drafts = [token for _, proposed in found for token in proposed]
    assert len(drafts) > 10 and set(drafts) == {7, 9}


@pytest.mark.drawn(3)
@compiled
@pytest.mark.parametrize("head", ["eagle", "medusa", "eagle3, token map"])
@pytest.mark.parametrize("name", PARAMS)
def test_outputs_are_those_without_drafts(
    name: str, head: str, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]
) -> None:
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    plain = run(changed(served.config), served.core.worker, PARAMS[name])
    quantized = {} if head == "eagle" else {"quantization": "int8"}
    config = with_head(served.config, tmp_path_factory.mktemp("head"), HEADS[head](), **quantized)
    worker = drafting_worker(config)
    for variant, each in {
        "together": config,
        "preemption": small_kv(config),
        "chunks": changed(config, max_num_batched_tokens=17),
        "no prefix cache": without_prefix_cache(changed(config, max_num_seqs=2)),
    }.items():
        driver = run(each, worker, PARAMS[name])
        assert driver.outputs == plain.outputs, variant
        assert driver.endings == plain.endings, variant
        assert driver.logprobs == plain.logprobs, variant
        assert driver.engine.state is not None and driver.engine.state.counters.num_draft_tokens > 0
