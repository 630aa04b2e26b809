"""Speculative decoding with recurrent states and windows: the outputs are those without drafts, bit for bit."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from tests.models.equality import few_blocks, load, with_blocks
from tests.models.speculation.test_bits import PARAMS, run
from tests.models.speculation.test_layouts import PROMPTS, foresee
from tests.models.test_engine import changed
from tests.models.test_equal import ROWS, made
from tests.models.test_hybrids import HF_CONFIG, of_tests

from quintet.core import recurrent_state
from quintet.wire.config import EngineConfig

DRAFTS = '{"num_speculative_tokens": 6}'
STATES = ("mamba", "mamba2, one group, limits", "falcon h1", "qwen 3.5", "lfm2", "jamba")
WINDOWS = ("gemma3", "gpt-oss")


def check(folder: Path, params: str, dtype: str, **options: str) -> None:
    """Compare runs in several schedules, with a state checkpoint every 32 tokens."""
    with mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        loaded = load(folder, dtype, speculative_config=DRAFTS, **options)  # type: ignore[arg-type]
        config, worker = changed(loaded.config), loaded.worker
        plain = run(changed(config, speculative=None), worker, PARAMS[params])
        foresee(worker, PROMPTS, plain)
        variants: dict[str, EngineConfig] = {
            "together": config,
            "synchronous": changed(config, max_steps_in_flight=1),
            "chunks": changed(config, max_num_batched_tokens=23, long_prefill_token_threshold=7),
            "three in flight": changed(config, max_steps_in_flight=3),
            "preemption": with_blocks(config, few_blocks(config)),
        }
        for variant, each in variants.items():
            driver = run(each, worker, PARAMS[params])
            assert driver.outputs == plain.outputs, variant
            assert driver.logprobs == plain.logprobs, variant
            assert driver.engine.state is not None
            assert driver.engine.state.counters.num_accepted_tokens > 5, variant


@pytest.mark.drawn(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", ["sampled", "penalties", "logprobs", "stops"])
@pytest.mark.parametrize("name", STATES)
def test_states_after_rejected_drafts_are_those_of_the_accepted_tokens(
    name: str, params: str, dtype: str, tmp_path: Path
) -> None:
    made(ROWS[name], tmp_path)
    check(tmp_path, params, dtype)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("params", ["sampled", "logprobs"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_release_blocks_among_drafts(name: str, params: str, tmp_path: Path) -> None:
    made(ROWS[name], tmp_path)
    check(tmp_path, params, "float32")


def test_states_next_to_windows(tmp_path: Path) -> None:
    with mock.patch.dict(HF_CONFIG, vocab_size=211), of_tests(tmp_path):
        check(tmp_path, "logprobs", "float32", load_format="dummy")
