"""Drafts of a smaller model: outputs are those without it, and its KV memory follows the served model's blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from tests.models.conftest import engine_config, in_groups
from tests.models.small_models import FAMILIES, SMALL, prompts_of
from tests.models.speculation.test_bits import PARAMS, drafting_worker, run
from tests.models.test_engine import CoreAndWorker, changed, small_kv, without_prefix_cache
from tokenizers import Tokenizer

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.embedded import default_model_path, draft_model_path
from quintet.executor.backends.registry import make_worker
from quintet.executor.kv_transfer.kv_identity import identity_of
from quintet.executor.slots import Rows
from quintet.executor.speculation.draft_model import DraftModel
from quintet.executor.worker import Worker
from quintet.wire.config import DraftModelConfig, EngineConfig, KvDiskConfig, SpeculativeConfig
from quintet.wire.params import SamplingParams

BLOCK_SIZE = 16


def with_draft(config: EngineConfig, draft: EngineConfig, *, group: int = 0, **limits: Any) -> EngineConfig:
    """Return the configuration with a draft model, and KV memory for as many blocks."""
    model = msgspec.structs.replace(draft.model, **limits)
    kv = msgspec.structs.replace(config.model.kv, draft_bytes=model.kv.bytes_per_block)
    speculative = SpeculativeConfig(
        method="draft_model", num_speculative_tokens=6, draft=DraftModelConfig(model=model, group=group)
    )
    num_blocks = config.model.kv.num_blocks(config.cache.memory_bytes)
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, kv=kv),
        cache=msgspec.structs.replace(config.cache, memory_bytes=num_blocks * kv.bytes_per_block),
    )
    return changed(config, speculative=speculative)


def saved(folder: Path, **changes: Any) -> EngineConfig:
    """Save a random model of one layer, and return a configuration that serves it."""
    torch.manual_seed(2)
    hf_config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1, **changes})
    transformers.AutoModelForCausalLM.from_config(hf_config).float().save_pretrained(folder)
    return engine_config(folder, json.loads((folder / "config.json").read_bytes()), BLOCK_SIZE, 96)


def drafter_of(worker: Worker) -> DraftModel:
    assert worker._speculation is not None
    drafter = worker._speculation.drafter
    assert isinstance(drafter, DraftModel)
    return drafter


def num_computed(worker: Worker) -> list[int]:
    """Return a list that receives the number of tokens of each step of the draft model."""
    drafter, counts = drafter_of(worker), list[int]()
    forward_and_draw = drafter._runner.forward_and_draw

    def counted(rows: Rows, *rest: Any) -> bytes | None:
        counts.append(int(rows.counts.sum()))
        return forward_and_draw(rows, *rest)

    drafter._runner.forward_and_draw = counted  # type: ignore[method-assign]
    return counts


@pytest.fixture
def draft(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return saved(tmp_path_factory.mktemp("draft"))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("serve", [BLOCK_SIZE], ids=["compiled"], indirect=True)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("draft_is", ["itself", "another"])
def test_outputs_are_those_without_drafts(
    draft_is: str, name: str, draft: EngineConfig, serve: Callable[..., Any]
) -> None:
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    plain = run(changed(served.config), served.core.worker, PARAMS[name])
    config = with_draft(served.config, served.config if draft_is == "itself" else draft)
    worker = drafting_worker(config)
    variants = {
        "together": config,
        "synchronous": changed(config, max_steps_in_flight=1),
        "preemption": small_kv(config),
        "chunks": changed(config, max_num_batched_tokens=17),
        "two at a time": changed(config, max_num_seqs=2),
    }
    for variant, each in variants.items():
        driver = run(each, worker, PARAMS[name])
        assert driver.outputs == plain.outputs, variant
        assert driver.endings == plain.endings, variant
        assert driver.logprobs == plain.logprobs, variant


@pytest.mark.parametrize("serve", [BLOCK_SIZE], ids=["compiled"], indirect=True)
@pytest.mark.parametrize("name", ["greedy", "sampled", "choices", "penalties", "biased"])
def test_every_draft_of_the_served_model_itself_is_accepted(name: str, serve: Callable[..., Any]) -> None:
    """A wrong key or value, or a draw with another random number or other logits processors, would reject some."""
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    config = with_draft(served.config, served.config)
    swapping = msgspec.structs.replace(config.cache, swap_bytes=40 * config.model.kv.bytes_per_block)
    config = msgspec.structs.replace(config, cache=swapping)
    worker = drafting_worker(config)
    for variant, each in {
        "together": config,
        "preemption": small_kv(config),
        "preemption without prefix cache": without_prefix_cache(small_kv(config)),
        "two at a time": changed(config, max_num_seqs=2),
    }.items():
        driver = run(each, worker, PARAMS[name])
        assert driver.engine.state is not None
        counters = driver.engine.state.counters
        assert counters.num_draft_tokens == counters.num_accepted_tokens > 100, variant
        assert (counters.preemptions > 0) == variant.startswith("preemption")


@pytest.mark.parametrize("serve", [BLOCK_SIZE], ids=["compiled"], indirect=True)
@pytest.mark.parametrize("step_tokens", [24, 57, 90, 150])
def test_requests_with_the_same_prompt_compute_each_block_once(
    step_tokens: int, serve: Callable[..., Any]
) -> None:
    """The draft model is the served model: a value that another request cleared would reject a draft."""
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    config = with_draft(served.config, served.config)
    worker = drafting_worker(config)
    drafter_of(worker)._max_tokens = step_tokens
    counts = num_computed(worker)
    driver = CoreAndWorker(config, worker)
    (prompt,) = prompts_of((70,))
    for request_id in range(1, 5):
        driver.admit(request_id, prompt, SamplingParams(temperature=1.0, max_tokens=20, seed=request_id))
    driver.run()
    assert driver.engine.state is not None
    counters = driver.engine.state.counters
    assert counters.num_draft_tokens == counters.num_accepted_tokens > 20
    assert max(counts) <= step_tokens and sum(counts) < 200, "each block was computed once"


@pytest.mark.parametrize("serve", [BLOCK_SIZE], ids=["compiled"], indirect=True)
def test_blocks_in_host_memory_and_on_disk_are_those_of_the_served_model(
    draft: EngineConfig, serve: Callable[..., Any], tmp_path: Path
) -> None:
    """Also their identity: a draft model may be added or removed while blocks are kept."""
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    size = 20 * served.config.model.kv.bytes_per_block
    disk = KvDiskConfig(folder=str(tmp_path), size_bytes=size, staging_bytes=size)
    cache = msgspec.structs.replace(served.config.cache, swap_bytes=size, disk=disk)
    config = msgspec.structs.replace(served.config, cache=cache)
    drafting = with_draft(config, draft)
    worker = drafting_worker(drafting)
    assert worker.kv is not None
    (back_end,) = worker.kv.back_ends
    tier = back_end.capacity
    assert (worker.num_host_blocks, tier.num_places, tier.num_staging_blocks) == (20, 20, 20)
    assert identity_of(drafting, "runner") == identity_of(config, "runner")
    worker.kv.close()


@pytest.mark.parametrize("serve", [BLOCK_SIZE], ids=["compiled"], indirect=True)
def test_cached_prefix_is_not_computed_again(draft: EngineConfig, serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    worker = drafting_worker(with_draft(served.config, draft))
    driver = CoreAndWorker(with_draft(served.config, draft), worker)
    counts = num_computed(worker)
    (prompt,) = prompts_of((50,))
    first_steps = []
    for request_id in (1, 2):
        begin = len(counts)
        driver.admit(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=8, seed=0))
        driver.run()
        first_steps.append(counts[begin])
    assert first_steps == [51, 51 - 48]


@pytest.mark.parametrize("serve", [BLOCK_SIZE], ids=["compiled"], indirect=True)
def test_long_prompt_is_computed_in_steps_of_limited_size(
    draft: EngineConfig, serve: Callable[..., Any]
) -> None:
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    config = changed(with_draft(served.config, draft), max_num_batched_tokens=20)
    worker = drafting_worker(config)
    counts = num_computed(worker)
    driver = CoreAndWorker(config, worker)
    driver.admit(1, prompts_of((50,))[0], SamplingParams(temperature=0.0, max_tokens=20, seed=0))
    driver.run()
    assert counts[:3] == [20, 20, 13] and len(driver.outputs[1]) == 20


@pytest.mark.parametrize("serve", [BLOCK_SIZE], ids=["compiled"], indirect=True)
@pytest.mark.parametrize("limits", [{"vocab_size": 120}, {"vocab_size": 300}, {"max_model_len": 60}])
def test_draft_model_with_other_limits(
    limits: dict[str, int], tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]
) -> None:
    """Tokens that one of the models lacks end the drafts; so does the context length of the draft model."""
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    plain = run(changed(served.config), served.core.worker, PARAMS["sampled"])
    vocabulary = {key: value for key, value in limits.items() if key == "vocab_size"}
    config = with_draft(served.config, saved(tmp_path_factory.mktemp("draft"), **vocabulary), **limits)
    driver = run(config, drafting_worker(config), PARAMS["sampled"])
    assert (driver.outputs, driver.endings) == (plain.outputs, plain.endings)


@pytest.mark.parametrize("serve", [BLOCK_SIZE], ids=["compiled"], indirect=True)
def test_layers_with_windows_in_both_models(serve: Callable[..., Any]) -> None:
    """The draft model uses the blocks of the served model's full attention, also in its own layers with a window."""
    served = serve(FAMILIES["qwen2-window"](), max_model_len=96)
    grouped = in_groups(served.config)
    group = next(index for index, each in enumerate(grouped.model.kv.groups) if each.kind == "full")
    config = with_draft(grouped, served.config, group=group)
    plain = run(changed(grouped), make_worker(changed(grouped)), PARAMS["sampled"])
    driver = run(config, drafting_worker(config), PARAMS["sampled"])
    assert (driver.outputs, driver.endings) == (plain.outputs, plain.endings)
    assert driver.engine.state is not None
    counters = driver.engine.state.counters
    assert counters.num_draft_tokens == counters.num_accepted_tokens > 100


def test_embedded_draft_model_saves_steps(tmp_path: Path) -> None:
    """Real weights: the draft model that ships with the package guesses many tokens of the toy model."""
    method = {"method": "draft_model", "model": str(draft_model_path()), "num_speculative_tokens": 4}
    drivers = []
    for speculative in (None, json.dumps(method)):
        options = Options(
            device="cpu", max_model_len=256, kv_cache_memory="4MiB", threads=1, speculative_config=speculative
        )
        config = resolve(options, tmp_path, http=False).config
        worker = make_worker(config) if speculative is None else drafting_worker(config)
        driver = CoreAndWorker(config, worker)
        tokenizer = Tokenizer.from_file(str(default_model_path() / "tokenizer.json"))
        for seed, text in enumerate(
            ["def __init__(self, name):\n", "import os\nimport sys\n", "class Error("]
        ):
            params = SamplingParams(temperature=0.6 * (seed % 2), max_tokens=60, seed=seed, ignore_eos=True)
            driver.admit(seed + 1, tokenizer.encode(text).ids, params)
        driver.run()
        drivers.append(driver)
    plain, drafting = drivers
    assert drafting.outputs == plain.outputs
    assert plain.engine.state is not None and drafting.engine.state is not None
    assert drafting.engine.state.counters.steps < 0.7 * plain.engine.state.counters.steps
