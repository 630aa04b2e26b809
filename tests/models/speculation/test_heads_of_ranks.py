"""Draft heads on rank 0 of the first stage: outputs are those of the same ranks without drafts.

Drafts are those of a reference; with stages, those of one process in the same schedule.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import transformers
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import Loaded, few_blocks, load, with_blocks
from tests.models.random_checkpoints import write_checkpoint
from tests.models.small_models import prompts_of
from tests.models.speculation.draft_heads import (
    Head,
    eagle3_head,
    eagle_head,
    medusa_heads,
    record_drafts,
)
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.mtp_checkpoints import KINDS, write
from tests.models.speculation.test_bits import PARAMS, Recorder, run
from tests.models.test_engine import changed
from tests.models.test_equal import ROWS

from quintet.core import recurrent_state
from quintet.executor.model_config import share
from quintet.wire.params import SamplingParams

HEADS: dict[str, Callable[[], Head]] = {"eagle": eagle_head, "eagle3": eagle3_head, "medusa": medusa_heads}
LAYOUTS = [
    *((name, 2, 1, 1) for name in HEADS),
    ("eagle3", 4, 2, 1),
    *((name, 2, 1, 1) for name in ("mimo", "glm4 moe, three layers", "deepseek v3", "qwen 3.5")),
    ("mimo", 4, 2, 1),
]
"""Head or model, ranks, ranks that share KV memory, and stages."""
STAGES = [
    *((name, 1, 1, 2) for name in HEADS),
    ("eagle3", 1, 1, 3),
    *((name, 1, 1, 2) for name in ("mimo", "glm4 moe, three layers", "deepseek v3")),
    ("eagle3", 2, 1, 2),
    ("mimo", 4, 2, 2),
]
"""As `LAYOUTS`."""
HOSTS = [
    *((name, 1, 2, 2) for name in ("eagle", "eagle3", "medusa", "mimo")),
    ("eagle3", 1, 3, 3),
    ("eagle3", 2, 2, 2),
    *((name, 2, 1, 2) for name in ("eagle3", "mimo", "qwen 3.5")),
]
"""Head or model, ranks, stages and hosts. With one stage, its ranks are on several hosts."""
FEW = SamplingParams(temperature=0.0, max_tokens=16, seed=0, logit_bias={7: 30.0, 9: 30.0, 11: 30.0})
"""Three tokens, so that random heads often propose the next one."""


def made(name: str, folder: Path) -> tuple[str, Any]:
    """Write a model with a head; return the flag, and a function that returns the drafts after some tokens."""
    keys: dict[str, object] = {"method": "mtp", "num_speculative_tokens": 4}
    if name in KINDS:
        return json.dumps(keys), write(name, folder).drafts
    write_checkpoint(ROWS["llama"], folder)
    reference, head = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), HEADS[name]()
    (folder / "head").mkdir()
    head.save(folder / "head")
    keys |= {"method": name, "model": str(folder / "head")}
    return json.dumps(keys), lambda tokens, count: head.drafts(reference, tokens, count)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("params", ["greedy", "sampled", "logprobs"])
@pytest.mark.parametrize(("name", "size", "context", "stages"), LAYOUTS)
def test_heads_change_no_output_of_ranks(
    name: str, size: int, context: int, stages: int, params: str, tmp_path: Path
) -> None:
    check_outputs(name, size, context, stages, params, tmp_path)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("params", ["greedy", "sampled", "logprobs", "choices"])
@pytest.mark.parametrize(("name", "size", "context", "stages"), STAGES)
def test_heads_change_no_output_of_stages(
    name: str, size: int, context: int, stages: int, params: str, tmp_path: Path
) -> None:
    check_outputs(name, size, context, stages, params, tmp_path)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("params", ["greedy", "sampled", "logprobs", "choices"])
@pytest.mark.parametrize(("name", "size", "stages", "hosts"), HOSTS)
def test_heads_change_no_output_of_hosts(
    name: str, size: int, stages: int, hosts: int, params: str, tmp_path: Path
) -> None:
    check_outputs(name, size, 1, stages, params, tmp_path, hosts)


def check_outputs(
    name: str, size: int, context: int, stages: int, params: str, tmp_path: Path, hosts: int = 1
) -> None:
    """Compare outputs with and without drafts, and greedy drafts with the reference's."""
    flag, reference = made(name, tmp_path)
    with (
        mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32),
        in_ranks(
            tmp_path, size, context=context, stages=stages, hosts=hosts, speculative_config=flag
        ) as loaded,
    ):
        worker: Any = loaded.worker
        plain = run(changed(loaded.config, speculative=None), worker, PARAMS[params])
        found = record_drafts(drafting(worker))
        config = changed(loaded.config)
        for each in (config, with_blocks(config, few_blocks(config))):
            driver = run(each, worker, PARAMS[params])
            assert driver.outputs == plain.outputs and driver.logprobs == plain.logprobs
            assert driver.engine.state is not None
            assert driver.engine.state.counters.num_draft_tokens > 20
    if params != "greedy":
        return
    proposals = [each for each in found if each[1]]
    for tokens, drafts in proposals[:: len(proposals) // 8]:
        expected = reference(tokens, len(drafts))
        assert drafts[: len(expected)] == expected


def in_layout(folder: Path, stages: int, flag: str) -> AbstractContextManager[Loaded]:
    """Load in one process, or in stages."""
    if stages == 1:
        return nullcontext(load(folder, speculative_config=flag))
    return in_ranks(folder, 1, stages=stages, speculative_config=flag)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", [*HEADS, "mimo", "glm4 moe, three layers"])
def test_stages_accept_the_drafts_of_one_process(name: str, tmp_path: Path) -> None:
    """One request after another: a prompt in chunks, a prefix hit, and choices that continue after a copied block."""
    flag, _ = made(name, tmp_path)
    (prompt,) = prompts_of((70,))
    requests = [
        (prompt, FEW),
        ([*prompt[:50], 1, 2, 3], FEW),
        (prompt[:21], msgspec.structs.replace(FEW, n=3, temperature=1.0)),
    ]
    outputs, drafts = list[object](), list[dict[tuple[int, ...], list[int]]]()
    for stages in (1, 2, 3):
        with in_layout(tmp_path, stages, flag) as loaded:
            driver = Recorder(
                changed(loaded.config, long_prefill_token_threshold=20), drafting(loaded.worker)
            )
            found = record_drafts(loaded.worker)
            for number, (tokens, params) in enumerate(requests, 1):
                driver.admit(10 * number, tokens, params)
                driver.run()
                if number == 2:
                    drafts.append({tuple(tokens): proposed for tokens, proposed in found if proposed})
            assert driver.cached[20] == 48 and driver.engine.state is not None
            assert driver.engine.state.counters.num_accepted_tokens > 10
            outputs.append(driver.outputs)
    assert outputs[0] == outputs[1] == outputs[2]
    for others in drafts[1:]:
        check_equal_drafts(drafts[0], others)


def test_prompt_logprobs_leave_the_hidden_states_of_the_prompt(tmp_path: Path) -> None:
    """Their logits arrive in the same memory, in several parts."""
    flag, _ = made("eagle3", tmp_path)
    (prompt,) = prompts_of((78,))
    drafts = list[dict[tuple[int, ...], list[int]]]()
    for stages in (1, 2):
        with mock.patch.object(share, "MIN_OUTPUTS", 16), in_layout(tmp_path, stages, flag) as loaded:
            driver = Recorder(changed(loaded.config), drafting(loaded.worker))
            found = record_drafts(loaded.worker)
            driver.admit(1, prompt, msgspec.structs.replace(FEW, prompt_logprobs=1))
            driver.run()
            drafts.append({tuple(tokens): proposed for tokens, proposed in found if proposed})
    assert drafts[0]
    check_equal_drafts(*drafts)


def check_equal_drafts(
    first: dict[tuple[int, ...], list[int]], second: dict[tuple[int, ...], list[int]]
) -> None:
    """Check that drafts after the same tokens are equal. Their number depends on the steps in flight."""
    common = first.keys() & second.keys()
    assert 2 * len(common) > len(first)
    for tokens in common:
        length = min(len(first[tokens]), len(second[tokens]))
        assert first[tokens][:length] == second[tokens][:length]


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_drafts_in_the_slot_of_a_canceled_prompt_are_unaffected(name: str, tmp_path: Path) -> None:
    """The next request starts in the slot while later stages compute a chunk of that prompt."""
    flag, _ = made(name, tmp_path)
    first, second = prompts_of((80, 30))
    outputs, drafts = list[object](), list[dict[tuple[int, ...], list[int]]]()
    for stages in (1, 2):
        with in_layout(tmp_path, stages, flag) as loaded:
            config = changed(loaded.config, long_prefill_token_threshold=20, max_num_seqs=1)
            driver = Recorder(config, drafting(loaded.worker))
            found = record_drafts(loaded.worker)
            driver.admit(1, first, FEW)
            driver.admit(2, second, FEW)
            plan = driver.engine.plan(0)
            assert plan is not None
            driver._begin([plan])
            driver._apply(driver.engine.cancel([1], 0))
            driver.run()
            outputs.append(driver.outputs[2])
            drafts.append({tuple(tokens): proposed for tokens, proposed in found if proposed})
    assert outputs[0] == outputs[1] and drafts[0]
    check_equal_drafts(*drafts)
