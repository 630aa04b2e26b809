"""Draft models with recurrent states: outputs are those without drafts, and each draft is of the right state."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.models import byte_vocabulary
from tests.models.equality import Loaded, few_blocks, load, with_blocks
from tests.models.random_checkpoints import write_checkpoint
from tests.models.small_models import prompts_of
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.test_bits import PARAMS, Recorder, run
from tests.models.speculation.test_draft_model import drafter_of, num_computed
from tests.models.speculation.test_random_traces import check_any_schedule
from tests.models.test_engine import CoreAndWorker, changed, without_prefix_cache
from tests.models.test_equal import ROWS

from quintet.core import recurrent_state
from quintet.deploy.tools.plan_parts import draft_plan
from quintet.executor.model_config import state_specs
from quintet.executor.speculation.draft_model import DraftModel
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

STATES = ("mamba", "mamba2, one group, limits", "falcon h1", "granite hybrid", "qwen 3.5", "lfm2", "jamba")
PAIRS = (
    ("qwen 3.5", "falcon h1"),
    ("falcon h1", "mamba2, one group, limits"),
    ("llama", "qwen 3.5"),
    ("mamba", "mamba2, one group, limits"),
)


@pytest.fixture(autouse=True)
def checkpoints() -> Iterator[None]:
    """Checkpoint the served model's states every 32 tokens."""
    with mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        yield


def with_draft(folder: Path, draft: Path, **options: Any) -> Loaded:
    """Load the models, with as many drafts as allowed."""
    keys = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 6}
    loaded = load(folder, speculative_config=json.dumps(keys), **options)
    drafting(loaded.worker)
    return Loaded(changed(loaded.config), loaded.worker)


def num_drafts(driver: CoreAndWorker) -> tuple[int, int]:
    """Return the numbers of verified and of accepted drafts."""
    assert driver.engine.state is not None
    counters = driver.engine.state.counters
    return counters.num_draft_tokens, counters.num_accepted_tokens


def variants_of(config: EngineConfig) -> dict[str, EngineConfig]:
    few = with_blocks(config, few_blocks(config))
    return {
        "together": config,
        "synchronous": changed(config, max_steps_in_flight=1),
        "chunks": changed(config, max_num_batched_tokens=23, long_prefill_token_threshold=7),
        "preemption": few,
        "preemption without prefix cache": without_prefix_cache(few),
        "two at a time": changed(config, max_num_seqs=2),
    }


@pytest.mark.drawn(3)
@pytest.mark.parametrize("params", ["greedy", "sampled", "choices", "penalties"])
@pytest.mark.parametrize("name", STATES)
def test_every_draft_of_the_served_model_itself_is_accepted(name: str, params: str, tmp_path: Path) -> None:
    """A wrong state, key or value would reject some."""
    write_checkpoint(ROWS[name], tmp_path)
    loaded = with_draft(tmp_path, tmp_path)
    for variant, config in variants_of(loaded.config).items():
        verified, accepted = num_drafts(run(config, loaded.worker, PARAMS[params]))
        assert verified == accepted > 50, variant


@pytest.mark.drawn(3)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_outputs_are_those_without_drafts(name: str, draft: str, params: str, tmp_path: Path) -> None:
    write_checkpoint(ROWS[name], tmp_path)
    write_checkpoint(ROWS[draft], tmp_path / "draft")
    plain = load(tmp_path)
    expected = run(changed(plain.config), plain.worker, PARAMS[params])
    loaded = with_draft(tmp_path, tmp_path / "draft")
    for variant, config in variants_of(loaded.config).items():
        driver = run(config, loaded.worker, PARAMS[params])
        assert driver.outputs == expected.outputs, variant
        assert driver.endings == expected.endings, variant
        assert driver.logprobs == expected.logprobs, variant


@pytest.mark.parametrize("step_tokens", [24, 57, 90, 150])
def test_requests_with_the_same_prompt_share_blocks(step_tokens: int, tmp_path: Path) -> None:
    """Each request computes the shared blocks again, for its own states; their content must stay valid meanwhile."""
    write_checkpoint(ROWS["qwen 3.5"], tmp_path)
    loaded = with_draft(tmp_path, tmp_path)
    drafter_of(loaded.worker)._max_tokens = step_tokens
    counts = num_computed(loaded.worker)
    driver = CoreAndWorker(loaded.config, loaded.worker)
    (prompt,) = prompts_of((70,))
    for request_id in range(1, 5):
        driver.admit(request_id, prompt, SamplingParams(temperature=1.0, max_tokens=20, seed=request_id))
    driver.run()
    verified, accepted = num_drafts(driver)
    assert verified == accepted > 20 and max(counts) <= step_tokens


def test_accepted_drafts_are_not_computed_again(tmp_path: Path) -> None:
    """Only if all were accepted: the state after them is then kept."""
    write_checkpoint(ROWS["qwen 3.5"], tmp_path)
    loaded = with_draft(tmp_path, tmp_path)
    counts = num_computed(loaded.worker)
    driver = CoreAndWorker(loaded.config, loaded.worker)
    driver.admit(1, prompts_of((50,))[0], SamplingParams(temperature=0.0, max_tokens=40, seed=0))
    driver.run()
    assert counts[:8] == [51, 1, 1, 1, 1, 1, 2, 1]


def test_requests_without_memory_for_states_get_no_drafts(tmp_path: Path) -> None:
    """An ended, preempted or lost request leaves its states to another one."""
    write_checkpoint(ROWS["falcon h1"], tmp_path)
    with mock.patch.object(state_specs, "DRAFT_STATES_SHARE", 0.0):
        loaded = with_draft(tmp_path, tmp_path)
        plan = draft_plan(loaded.config)
    states = drafter_of(loaded.worker)._kv.states
    assert states is not None and len(states.places[0]) == 2, "of one request"
    assert plan is not None and plan.state_bytes == sum(place.nbytes for place in states.places)
    for _ in range(3):
        driver = Recorder(loaded.config, loaded.worker)
        for request_id, prompt in enumerate(prompts_of((9, 29, 50)), 1):
            driver.admit(
                request_id, prompt, SamplingParams(temperature=1.0, max_tokens=8 * request_id, seed=1)
            )
        driver.run()
        verified, accepted = num_drafts(driver)
        assert verified == accepted > 10
        loaded.worker.reset()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["qwen 3.5", "falcon h1", "mamba"])
def test_any_request_in_any_schedule(name: str, seed: int, tmp_path: Path) -> None:
    """Half of the drafts are replaced, some by wrong ones, so that all numbers of accepted drafts occur."""
    write_checkpoint(ROWS[name], tmp_path)
    configs = load(tmp_path).config, with_draft(tmp_path, tmp_path).config
    plain, config = (
        byte_vocabulary.with_vocabulary(changed(each, max_num_seqs=8), tmp_path) for each in configs
    )
    with mock.patch.object(DraftModel, "reads_steps", True):  # not replaced by other drafters
        check_any_schedule(random.Random(seed), plain, config)
