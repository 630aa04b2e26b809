"""Operations of the core on the executor: fork, mix, preempt, reuse slots, copy blocks, plan ahead of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers

from quintet.wire.codec import pack_i32, pack_u8, unpack_i32
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan

RANDOM = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=None)
PROMPTS = [[(5 * i + n) % 97 for i in range(n)] for n in (3, 9, 14, 30)]


@pytest.fixture
def served(serve: Callable[..., Any]) -> Any:
    return serve(
        transformers.Qwen2Config(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        ),
        max_model_len=128,
    )


def test_decode_rows_and_prompt_chunks_share_steps(served: Any) -> None:
    expected = served.greedy(PROMPTS, 16)
    requests = []
    for prompt in PROMPTS:  # each arrives while the earlier ones decode
        requests.append(served.core.add(prompt, max_tokens=16))
        served.core.advance(chunk=4)
        served.core.advance(chunk=4)
    served.core.run(chunk=4)
    assert [request.outputs for request in requests] == expected


def test_forks_continue_from_shared_and_copied_blocks(served: Any) -> None:
    core, prompt = served.core, PROMPTS[3]  # 30 tokens: full blocks, and a partial one
    parent = core.add(prompt, max_tokens=12)
    core.advance()
    forks = [core.fork(parent, max_tokens=12) for _ in range(3)]
    core.run()
    whole = (len(prompt) - 1) // core.block_size
    assert forks[0].blocks[:whole] == parent.blocks[:whole]
    assert forks[0].blocks[whole] != parent.blocks[whole]
    assert [fork.outputs for fork in forks] == [parent.outputs] * 3
    assert parent.outputs == served.greedy([prompt], 12)[0]


def test_random_forks_draw_the_tokens_of_separate_requests(served: Any) -> None:
    core, prompt = served.core, PROMPTS[2]
    alone = []
    for seed in (1, 2, 3):
        request = core.add(prompt, max_tokens=12, params=RANDOM, seed=seed)
        core.run()
        alone.append(request.outputs)
    parent = core.add(prompt, max_tokens=12, params=RANDOM, seed=1)
    core.advance()
    forks = [core.fork(parent, max_tokens=12, params=RANDOM, seed=seed) for seed in (2, 3)]
    core.run()
    assert [parent.outputs, *(fork.outputs for fork in forks)] == alone


def test_reused_slots_keep_no_state(served: Any) -> None:
    core = served.core
    demanding = SamplingParams(
        temperature=1.5, top_k=3, presence_penalty=2.0, logit_bias={5: 90.0}, logprobs=2
    )
    for _ in range(20):  # more than there are slots
        core.add(PROMPTS[1], max_tokens=3, params=demanding)
        core.run()
    request = core.add(PROMPTS[1], max_tokens=16)
    core.run()
    assert request.outputs == served.greedy(PROMPTS[1:2], 16)[0]
    assert not core.results[-1][1].logprobs


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), RANDOM], ids=["greedy", "random"])
def test_preempted_request_continues_with_the_same_tokens(served: Any, params: SamplingParams) -> None:
    core = served.core
    whole = core.add(PROMPTS[3], max_tokens=20, params=params, seed=7)
    core.run(chunk=8)
    resumed = core.add(
        PROMPTS[3] + whole.outputs[:9], max_tokens=20, params=params, seed=7, num_prompt=len(PROMPTS[3])
    )
    core.run(chunk=5)
    assert resumed.outputs == whole.outputs


def test_reset_clears_every_slot(served: Any) -> None:
    core = served.core
    core.add(PROMPTS[3], max_tokens=100)
    core.advance()
    core.worker.reset()
    core.running.clear()
    request = core.add(PROMPTS[0], max_tokens=8)
    core.run()
    assert request.outputs == served.greedy(PROMPTS[:1], 8)[0]


def test_plan_may_precede_its_input_tokens(served: Any) -> None:
    """Overlap: plan 2 is complete before plan 1 has run; its input token comes from the executor's own table."""
    prompt = PROMPTS[1]
    row = NewRow(
        slot=4,
        generation=1,
        request_id=1,
        token_ids=pack_i32(prompt),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(temperature=0.0),
        seed=0,
    )
    blocks = [value for at in range(4) for value in (4, 0, at, 10 + at)]
    plans = [
        StepPlan(
            step=1 + i,
            sent_ns=0,
            freed=b"",
            new_rows=[row] if i == 0 else [],
            blocks=pack_i32(blocks) if i == 0 else b"",
            copies=b"",
            slots=pack_i32([4]),
            starts=pack_i32([0 if i == 0 else len(prompt) + i - 1]),
            counts=pack_i32([len(prompt) if i == 0 else 1]),
            samples=pack_u8([1]),
        )
        for i in range(6)
    ]
    tokens = [unpack_i32(served.core.worker.execute(plan).token_ids)[0] for plan in plans]
    assert tokens == served.greedy([prompt], 6)[0]


@pytest.mark.parametrize("num_own", [1, 5, 11])
def test_row_reads_blocks_filled_by_the_previous_row(served: Any, num_own: int) -> None:
    """Requests of one batch share a prefix before any step has computed it."""
    start = 3 * served.core.block_size
    shared = [(5 * 3 + n) % 97 for n in range(start)]
    prompts = [shared + [7] * 3, shared + [9] * num_own]
    tables = [[10, 11, 12, 13, 14], [10, 11, 12, 20, 21, 22]]
    plan = StepPlan(
        step=1,
        sent_ns=0,
        freed=b"",
        new_rows=[
            NewRow(
                slot, slot + 1, slot + 1, pack_i32(prompt), len(prompt), SamplingParams(temperature=0.0), 0
            )
            for slot, prompt in enumerate(prompts)
        ],
        blocks=pack_i32(
            [v for slot, table in enumerate(tables) for i, b in enumerate(table) for v in (slot, 0, i, b)]
        ),
        copies=b"",
        slots=pack_i32([0, 1]),
        starts=pack_i32([0, start]),
        counts=pack_i32([start + 3, num_own]),
        samples=pack_u8([1, 1]),
    )
    tokens = list(unpack_i32(served.core.worker.execute(plan).token_ids))
    served.core.worker.reset()
    assert tokens == [token for (token,) in served.greedy(prompts, 1)]


def test_plan_without_rows_only_changes_tables(served: Any) -> None:
    plan = StepPlan(1, 0, pack_i32([3]), [], b"", b"", b"", b"", b"", b"")
    result = served.core.worker.execute(plan)
    assert (result.step, result.token_ids) == (1, b"")
