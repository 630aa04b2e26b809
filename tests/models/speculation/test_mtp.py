"""Multi-token prediction layers: drafts are those of a reference, and outputs are those without drafts."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import msgspec
import pytest
from tests.models.equality import few_blocks, load, with_blocks
from tests.models.small_models import prompts_of
from tests.models.speculation.draft_heads import record_drafts
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.mtp_checkpoints import KINDS, Reference, write
from tests.models.speculation.test_bits import PARAMS, run
from tests.models.test_engine import CoreAndWorker, changed, without_prefix_cache

from quintet.core import recurrent_state
from quintet.wire.params import SamplingParams

FLAG = '{"method": "mtp", "num_speculative_tokens": 4}'
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, seed=0, ignore_eos=True)


@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    check_drafts(write(name, tmp_path), tmp_path)


def check_drafts(reference: Reference, path: Path) -> None:
    """Compare drafts of a folder or GGUF file."""
    loaded = load(path, speculative_config=FLAG)
    worker = drafting(loaded.worker)
    found = record_drafts(worker)
    driver = CoreAndWorker(changed(loaded.config, max_num_batched_tokens=40), worker)
    for index, prompt in enumerate(prompts_of((1, 8, 50))):
        driver.admit(index + 1, prompt, GREEDY)
    driver.run()
    driver.admit(9, prompts_of((1, 8, 50))[2], GREEDY)  # after a cached prefix
    driver.run()
    proposals = [each for each in found if each[1]]
    assert len(proposals) > 40
    num_compared = 0
    for tokens, drafts in (*proposals[:20:4], *proposals[20::7], proposals[-1]):
        expected = reference.drafts(tokens, len(drafts))
        assert drafts[: len(expected)] == expected
        num_compared += len(expected)
    assert num_compared > 30


@pytest.mark.drawn(4)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_those_without_drafts(name: str, params: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    with mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        plain = load(tmp_path)
        expected = run(changed(plain.config), plain.worker, PARAMS[params])
        loaded = load(tmp_path, speculative_config=FLAG)
        config, worker = changed(loaded.config), drafting(loaded.worker)
        for variant, each in {
            "together": config,
            "preemption": with_blocks(config, few_blocks(config)),
            "chunks": changed(config, max_num_batched_tokens=17),
            "no prefix cache": without_prefix_cache(changed(config, max_num_seqs=2)),
        }.items():
            driver = run(each, worker, PARAMS[params])
            assert driver.outputs == expected.outputs, variant
            assert driver.endings == expected.endings, variant
            assert driver.logprobs == expected.logprobs, variant
            assert driver.engine.state is not None
            assert driver.engine.state.counters.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["qwen3 next"])
def test_next_turn_continues_after_the_last_token_of_a_request(name: str, tmp_path: Path) -> None:
    """The state at the end of a request is cached, so the next prompt starts within a block."""
    reference = write(name, tmp_path)
    loaded = load(tmp_path, speculative_config=FLAG)
    worker = drafting(loaded.worker)
    found = record_drafts(worker)
    driver = CoreAndWorker(changed(loaded.config), worker)
    tokens, short = prompts_of((25,))[0], msgspec.structs.replace(GREEDY, max_tokens=12)
    for turn in range(1, 4):
        driver.admit(turn, tokens, short)
        driver.run()
        assert turn == 1 or driver.cached[turn] % 16, "a state within a block"
        tokens = [*tokens, *driver.outputs[turn], turn, 9]
    proposals = [each for each in found if each[1]]
    assert len(proposals) > 20
    for known, drafts in proposals[::3]:
        expected = reference.drafts(known, len(drafts))
        assert drafts[: len(expected)] == expected
