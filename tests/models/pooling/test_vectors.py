"""Pooled vectors equal hidden states of transformers in fp32, and have the same bits in every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.models import equality
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import Dtype, Loaded, few_blocks, load, with_blocks
from tests.models.kv.test_swapping import with_host_memory
from tests.models.random_checkpoints import Row, write_checkpoint
from tests.models.rows import dense, gemma, gpt, latent, llama, moe, states
from tests.models.small_models import prompts_of
from tests.models.test_engine import GREEDY, CoreAndWorker, changed, small_kv
from tests.models.test_oom_split import limit_tokens

from quintet.executor.backends.registry import make_worker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams
from quintet.wire.pooling import PoolingType

LAST, MEAN = PoolingType.LAST, PoolingType.MEAN
PARAMS = {
    LAST: SamplingParams(max_tokens=1, temperature=0.0),
    MEAN: SamplingParams(max_tokens=1, temperature=0.0, skip_reading_prefix_cache=True),
}
ROWS: dict[str, Row] = {
    "llama": llama.ROWS["llama"],
    "gpt2": gpt.ROWS["gpt2"],
    "cohere2": dense.ROWS["cohere2"],
    "gemma 3": gemma.ROWS["gemma3"],
    "deepseek v3": latent.ROWS["deepseek v3"],
    "mixtral": moe.ROWS["mixtral"],
    "mamba2": states.ROWS["mamba2"],
    "qwen3 next": states.ROWS["qwen3 next"],
}
CLOSE = 2e-5
"""Largest difference from the reference, relative to the length of the vector: fp32 sums in another order."""

Vectors = dict[tuple[PoolingType, int], bytes]


def pooled(
    config: EngineConfig,
    worker: Any,
    prompts: Sequence[list[int]],
    *,
    rounds: int = 1,
    generates: bool = True,
) -> tuple[Vectors, CoreAndWorker]:
    """Pool each prompt in both ways, in the last of some rounds, beside requests that generate."""
    driver = CoreAndWorker(config, worker)
    for number in range(rounds):
        first = 1000 * number
        for i, prompt in enumerate(prompts):
            driver.admit(first + 3 * i, prompt, PARAMS[LAST], pooling=LAST)
            driver.admit(first + 3 * i + 1, prompt, PARAMS[MEAN], pooling=MEAN)
            if generates:
                driver.admit(first + 3 * i + 2, prompt[: 1 + i], GREEDY)
        driver.run()
    assert driver.engine.state is not None and driver.engine.state.num_claims["pooling"] == 0
    found = {
        (kind, i): driver.vectors[first + 3 * i + kind] for kind in (LAST, MEAN) for i in range(len(prompts))
    }
    return found, driver


def alone(loaded: Loaded, prompts: Sequence[list[int]]) -> Vectors:
    """Pool each prompt alone, in one chunk."""
    found: Vectors = {}
    for i, prompt in enumerate(prompts):
        for kind in (LAST, MEAN):
            driver = CoreAndWorker(changed(loaded.config), loaded.worker)
            driver.admit(1, prompt, PARAMS[kind], pooling=kind)
            driver.run()
            found[kind, i] = driver.vectors[1]
    return found


def check_schedules(loaded: Loaded, prompts: Sequence[list[int]], expected: Vectors) -> None:
    """Check that no schedule changes a bit, and that each schedule happened."""
    for name, settings in equality.MORE_SCHEDULES.items():
        config = changed(loaded.config, **settings)
        if "preemption" in name:
            config = with_blocks(config, few_blocks(config))
        hits = "prefix hits" in name
        found, driver = pooled(config, loaded.worker, prompts, rounds=2 if hits else 1)
        assert found == expected, name
        assert driver.engine.state is not None
        assert not hits or max(driver.cached.values()) > 0, name


def reference(folder: Path, prompts: Sequence[list[int]]) -> dict[tuple[PoolingType, int], torch.Tensor]:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    with torch.inference_mode():
        for i, prompt in enumerate(prompts):
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
            found[LAST, i], found[MEAN, i] = hidden[-1], hidden.mean(0)
    return found


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ROWS)
def test_vectors_equal_hidden_states_of_transformers(name: str, tmp_path: Path) -> None:
    write_checkpoint(ROWS[name], tmp_path)
    loaded, prompts = load(tmp_path, runner="pooling"), prompts_of()
    expected = reference(tmp_path, prompts)
    vectors = alone(loaded, prompts)
    for key, vector in vectors.items():
        found, wanted = torch.from_numpy(np.frombuffer(vector, np.float32).copy()), expected[key]
        assert float((found - wanted).norm() / wanted.norm()) < CLOSE, key
    check_schedules(loaded, prompts, vectors)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba2"])
def test_bits_are_equal_in_every_schedule(name: str, dtype: Dtype, tmp_path: Path) -> None:
    write_checkpoint(ROWS[name], tmp_path)
    loaded, prompts = load(tmp_path, dtype, runner="pooling"), prompts_of()
    check_schedules(loaded, prompts, alone(loaded, prompts))


def test_prompt_of_the_whole_context(tmp_path: Path) -> None:
    """A pooling request needs no room for an output, whether or not its last token is alone in a step."""
    write_checkpoint(ROWS["llama"], tmp_path)
    loaded = load(tmp_path, runner="pooling")
    [prompt] = prompts_of((loaded.config.model.max_model_len,))
    expected = alone(loaded, [prompt])
    for chunk in (1, 19):
        config = changed(loaded.config, long_prefill_token_threshold=chunk)
        found, _ = pooled(config, loaded.worker, [prompt], generates=False)
        assert found == expected


def test_vectors_after_swapping_and_with_little_device_memory(tmp_path: Path) -> None:
    write_checkpoint(ROWS["llama"], tmp_path)
    loaded, prompts = load(tmp_path, runner="pooling"), prompts_of((50, 60, 70, 80))
    expected = alone(loaded, prompts)
    swapping = with_host_memory(small_kv(changed(loaded.config, max_num_batched_tokens=13)))
    found, driver = pooled(swapping, make_worker(swapping), prompts)
    assert found == expected
    assert driver.engine.state is not None and driver.engine.state.counters.preemptions > 0


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_vectors_of_steps_that_are_split(
    max_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory after all writes: parts of a step are computed again."""
    write_checkpoint(ROWS["llama"], tmp_path)
    loaded, prompts = load(tmp_path, runner="pooling"), prompts_of()
    expected = alone(loaded, prompts)
    limit_tokens(loaded.worker, max_tokens, monkeypatch)
    found, _ = pooled(changed(loaded.config), loaded.worker, prompts)
    assert found == expected and loaded.worker.num_split > 0


def test_drafts_of_other_requests_change_no_vector(tmp_path: Path) -> None:
    write_checkpoint(ROWS["llama"], tmp_path)
    prompts = prompts_of()
    expected = alone(load(tmp_path, runner="pooling"), prompts)
    speculative = '{"method": "ngram", "num_speculative_tokens": 3}'
    loaded = load(tmp_path, runner="pooling", speculative_config=speculative)
    check_schedules(loaded, prompts, expected)


@pytest.mark.parametrize(("size", "context"), [(2, 1), (4, 2)])
def test_ranks_give_the_same_bits_in_every_schedule(size: int, context: int, tmp_path: Path) -> None:
    write_checkpoint(ROWS["llama"], tmp_path)
    prompts = prompts_of()
    with in_ranks(tmp_path, size, runner="pooling", context=context) as loaded:
        check_schedules(loaded, prompts, alone(loaded, prompts))


def test_torch_gives_the_vectors_too(tmp_path: Path) -> None:
    """Without the compiled kernels: other sums, so the bits differ."""
    write_checkpoint(ROWS["llama"], tmp_path)
    prompts = prompts_of()
    expected = reference(tmp_path, prompts)
    loaded = load(tmp_path, runner="pooling", compiled=False)
    found, _ = pooled(changed(loaded.config), loaded.worker, prompts)
    for key, vector in found.items():
        apart = torch.from_numpy(np.frombuffer(vector, np.float32).copy()) - expected[key]
        assert float(apart.norm() / expected[key].norm()) < CLOSE, key
