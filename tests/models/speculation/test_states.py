"""Speculative decoding with recurrent states and windows: the outputs are those without drafts, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from tests.models.equality import few_blocks, load, with_blocks
from tests.models.random_checkpoints import write_checkpoint
from tests.models.small_models import prompts_of
from tests.models.speculation.draft_heads import record_drafts
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.test_bits import PARAMS, run
from tests.models.speculation.test_draft_model import saved
from tests.models.speculation.test_layouts import PROMPTS, use_oracle_drafts
from tests.models.test_engine import CoreAndWorker, changed
from tests.models.test_equal import ROWS, made
from tests.models.test_hybrids import HF_CONFIG, of_tests

from quintet.core import recurrent_state
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

DRAFTS = '{"num_speculative_tokens": 6}'
STATES = ("mamba", "mamba2, one group, limits", "falcon h1", "qwen 3.5", "lfm2", "jamba")
WINDOWS = ("gemma3", "gpt-oss")


def check(folder: Path, params: str, dtype: str, **options: str) -> None:
    """Compare runs in several schedules, with a state checkpoint every 32 tokens."""
    with mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        loaded = load(folder, dtype, speculative_config=DRAFTS, **options)  # type: ignore[arg-type]
        config, worker = changed(loaded.config), loaded.worker
        plain = run(changed(config, speculative=None), worker, PARAMS[params])
        use_oracle_drafts(worker, PROMPTS, plain)
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


@pytest.mark.drawn(2)
@pytest.mark.parametrize("params", ["greedy", "sampled", "logprobs"])
@pytest.mark.parametrize("name", ["qwen 3.5", "falcon h1", "jamba"])
def test_draft_model_of_a_model_with_states(name: str, params: str, tmp_path: Path) -> None:
    """Its drafts are those of a reference, also after cached states within a block."""
    write_checkpoint(ROWS[name], tmp_path)
    saved(tmp_path / "draft", num_hidden_layers=2)
    (tmp_path / "draft" / "tokenizer.json").write_text("{}")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
    keys = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 4}
    with mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        plain = load(tmp_path)
        expected = run(changed(plain.config), plain.worker, PARAMS[params])
        loaded = load(tmp_path, speculative_config=json.dumps(keys))
        found = record_drafts(drafting(loaded.worker))
        config = changed(loaded.config)
        for each in (config, with_blocks(config, few_blocks(config))):
            driver = run(each, loaded.worker, PARAMS[params])
            assert driver.outputs == expected.outputs and driver.logprobs == expected.logprobs
        driver = CoreAndWorker(config, loaded.worker)
        tokens, short = prompts_of((25,))[0], SamplingParams(temperature=0.0, max_tokens=12, seed=0)
        for turn in range(1, 4):
            driver.admit(turn, tokens, short)
            driver.run()
            tokens = [*tokens, *driver.outputs[turn], turn, 9]
        assert driver.cached[3] % 16, "a state within a block"
    proposals = [each for each in found if each[1]] if params == "greedy" else found[-12:]
    for known, drafts in proposals[:: max(1, len(proposals) // 12)]:
        for count, draft in enumerate(drafts):
            logits = reference(torch.tensor([known + drafts[:count]])).logits[0, -1]
            assert draft == int(logits.argmax())


def test_states_next_to_windows(tmp_path: Path) -> None:
    with mock.patch.dict(HF_CONFIG, vocab_size=211), of_tests(tmp_path):
        check(tmp_path, "logprobs", "float32", load_format="dummy")
