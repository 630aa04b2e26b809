"""Pipeline stages give the bits of one process, in every schedule."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
import transformers
from tests.executor.test_step_overlap import LoopBench as ExecutorLoop
from tests.gguf.random_blocks import in_blocks
from tests.gguf.test_packed import WIDE, as_q4_k_m
from tests.models import byte_vocabulary
from tests.models.distributed.ranks import config_of, in_ranks
from tests.models.equality import (
    GREEDY,
    NUM_BLOCKS,
    SCHEDULES,
    Loaded,
    alone,
    few_blocks,
    load,
    run,
    run_schedules,
    with_blocks,
)
from tests.models.random_checkpoints import NUM_TOKENS, Expectation, of_transformers
from tests.models.test_embeds import mixed
from tests.models.test_engine import CoreAndWorker, changed
from tests.models.test_equal import ROWS, made

from quintet.core.token_messages import StepMessages
from quintet.deploy.supervisor.run_dirs import make_run_dir
from quintet.executor.backends.registry import make_worker
from quintet.executor.context import WorkerContext
from quintet.executor.distributed.parallel.pipeline import InFlightStep, Pipeline
from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.executor.distributed.parallel.ranks import share_of_rank
from quintet.executor.interface import Pending, StepWorker
from quintet.executor.sampling.sampler import Sampler
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams
from quintet.wire.step import Capacity, StepResult

FAST = ("llama", "gpt2", "phi4 mini")
"""An untied output layer; a tied one with learned positions; a rotation that depends on the prompt's length."""


def check(loaded: Loaded, expected: list[Expectation], schedules: dict[str, dict[str, int]]) -> None:
    """Check that the tokens are the reference's, in every schedule."""
    prompts, outputs = [each.prompt for each in expected], [each.outputs for each in expected]
    for schedule, outcome in run_schedules(loaded, prompts, False, {"together": {}} | schedules):
        assert outcome.outputs == outputs, schedule


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("stages", "size"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", FAST)
def test_tokens_equal_those_of_one_process(name: str, stages: int, size: int, tmp_path: Path) -> None:
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, stages=stages) as loaded:
        check(loaded, expected, {"preemption": SCHEDULES["preemption"]})


@pytest.mark.whole
@pytest.mark.parametrize("name", ROWS)
def test_every_family(name: str, tmp_path: Path) -> None:
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, 1, stages=2) as loaded:
        check(loaded, expected, SCHEDULES)


@pytest.mark.parametrize(
    ("name", "size", "invariant"),
    [("llama", 1, False), ("llama", 2, True), ("qwen3 next", 1, True)],
    ids=["stages", "ranks of stages, invariant", "a hybrid, invariant"],
)
def test_logits_have_the_bits_of_one_process(name: str, size: int, invariant: bool, tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS[name], tmp_path)]
    whole = load(tmp_path, "bfloat16", layout_invariant=invariant)
    expected = alone(whole, prompts).bits
    seen: list[bytes] = []
    take = Pipeline.take

    def watched(pipeline: Pipeline, flight: InFlightStep) -> torch.Tensor:
        logits = take(pipeline, flight)
        count = flight.step.c.num_outputs
        seen.extend(row.view(torch.uint8).numpy().tobytes() for row in logits[:count])
        return logits

    ranks = in_ranks(tmp_path, size, "bfloat16", stages=2, invariant=invariant)
    with ranks as loaded, mock.patch.object(Pipeline, "take", watched):
        for i, prompt in enumerate(prompts):
            seen.clear()
            run(loaded, changed(loaded.config), [prompt])
            positions = sorted(at for request, at in expected if request == i)
            assert seen[: len(positions)] == [expected[i, at] for at in positions], len(prompt)


class LogprobRecorder(CoreAndWorker):
    """Records the log-probabilities of every step."""

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self.drawn: list[tuple[int, bytes, bytes]] = []
        self.of_prompts: list[tuple[int, bytes, bytes]] = []
        super().__init__(config, worker)

    def _apply(self, effects: StepMessages) -> None:
        super()._apply(effects)
        for _, tokens in effects.tokens:
            self.drawn += [(each.rank, each.token_ids, each.logprobs) for each in tokens.logprobs]
            for logprobs in tokens.prompt_logprobs:
                size = 4 * logprobs.width
                self.of_prompts += [
                    (
                        logprobs.first + i,
                        logprobs.token_ids[at : at + size],
                        logprobs.logprobs[at : at + size],
                    )
                    for i, at in enumerate(range(0, len(logprobs.token_ids), size))
                ]


def test_log_probabilities_have_the_bits_of_one_process(tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]
    params = msgspec.structs.replace(GREEDY, logprobs=3, prompt_logprobs=2)

    def logprobs(loaded: Loaded) -> tuple[list[tuple[int, bytes, bytes]], list[tuple[int, bytes, bytes]]]:
        driver = LogprobRecorder(changed(loaded.config), loaded.worker)
        for i, prompt in enumerate(prompts):
            driver.admit(i, prompt, params)
        driver.run()
        return sorted(driver.drawn), sorted(driver.of_prompts)

    expected = logprobs(load(tmp_path, "bfloat16"))
    assert len(expected[0]) == params.max_tokens * len(prompts)
    assert len(expected[1]) == sum(len(prompt) - 1 for prompt in prompts)
    with in_ranks(tmp_path, 1, "bfloat16", stages=2) as loaded:
        assert logprobs(loaded) == expected


def test_prompt_logprobs_after_a_cancelled_prompt_in_the_same_slot(tmp_path: Path) -> None:
    """Both steps with the cancelled prompt also decode another request, and are in flight when the new prompt begins."""
    first, second, third, *_ = made(ROWS["llama"], tmp_path)
    with in_ranks(tmp_path, 1, stages=3) as loaded:
        driver = CoreAndWorker(changed(loaded.config, max_num_batched_tokens=8), loaded.worker)
        pending: deque[Pending] = deque()

        def begin() -> None:
            plan = driver.engine.plan(0)
            assert plan is not None
            pending.append(driver.worker.begin(plan))

        def end() -> None:
            driver._apply(driver.engine.commit(pending.popleft().result(), 0))

        driver.admit(1, first.prompt, GREEDY)
        driver.admit(2, second.prompt, GREEDY)
        while len(driver.outputs) < 2:
            begin()
            end()
        driver.admit(3, [5] * 30, GREEDY)
        begin()
        begin()
        driver._apply(driver.engine.cancel([3], 0))
        driver.admit(4, third.prompt, msgspec.structs.replace(GREEDY, prompt_logprobs=0))
        begin()
        while pending:
            end()
        driver.run()
    assert [driver.outputs[i] for i in (1, 2, 4)] == [each.outputs for each in (first, second, third)]


@pytest.mark.whole
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_file_in_stages(tied: bool, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    family = of_transformers("Qwen2Config", tie_word_embeddings=tied, **WIDE)
    expected = made(in_blocks(family, as_q4_k_m, file), tmp_path)
    with in_ranks(file, 1, stages=2) as loaded:
        check(loaded, expected, SCHEDULES)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=1.1, top_p=0.9, seed=7, max_tokens=NUM_TOKENS, repetition_penalty=1.3),
        SamplingParams(temperature=1.1, seed=7, max_tokens=NUM_TOKENS),
    ],
    ids=["log-probabilities", "penalties", "drawn"],
)
def test_drawn_tokens_are_equal(params: SamplingParams, tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]
    whole = load(tmp_path, "bfloat16")
    expected = run(whole, changed(whole.config), prompts, params=params)
    with in_ranks(tmp_path, 1, "bfloat16", stages=2) as loaded:
        assert run(loaded, changed(loaded.config), prompts, params=params).outputs == expected.outputs


@pytest.mark.parametrize("name", ["gemma3", "qwen3 next"])
def test_stages_reserve_the_configured_memory(name: str, tmp_path: Path) -> None:
    """Their layers are in several groups, so several stages may share a block."""
    made(ROWS[name], tmp_path)
    config = config_of(tmp_path, 1, 2, "float32", "none", "auto", None, experts=False)
    kv = config.model.kv
    assert len(kv.groups) > 1
    reserved = sum(
        sum(
            place.numel()
            for place in WorkerContext(config, share=share_of_rank(config, rank))
            .reserve_kv(torch.float32)
            .places
        )
        for rank in range(2)
    )
    assert reserved == config.cache.memory_bytes == NUM_BLOCKS * kv.bytes_per_block


@pytest.mark.parametrize("stages", [2, 3])
def test_structured_outputs_with_mixed_steps_in_flight(stages: int, tmp_path: Path) -> None:
    """Every third request is plain, so that steps of all kinds are in flight together."""
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]

    def answers(loaded: Loaded) -> dict[int, list[int]]:
        driver = CoreAndWorker(changed(loaded.config), loaded.worker)
        for i, params in enumerate(byte_vocabulary.requested()):
            driver.admit(i, prompts[i % len(prompts)][:8], params)
        driver.run()
        return driver.outputs

    def with_vocabulary(config: EngineConfig) -> EngineConfig:
        return byte_vocabulary.with_vocabulary(config, tmp_path)

    config = with_vocabulary(load(tmp_path, "float32").config)
    expected = answers(Loaded(config, make_worker(config)))
    with in_ranks(tmp_path, 1, stages=stages, change=with_vocabulary) as loaded:
        together = answers(loaded)
    byte_vocabulary.check(together)
    assert together == expected


@pytest.mark.parametrize(
    ("params", "raises"),
    [(GREEDY, "pipeline"), (msgspec.structs.replace(GREEDY, logprobs=1), "sampler")],
    ids=["by the kernels", "by the sampler"],
)
def test_failed_draw_does_not_affect_other_requests(
    params: SamplingParams, raises: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third draw of a run is out of memory: the core receives the error, and every request is computed to its end."""
    expectations = made(ROWS["llama"], tmp_path)
    owner: type = Pipeline if raises == "pipeline" else Sampler
    draw, num_draws = owner.draw, 0  # type: ignore[attr-defined]

    def draw_once_without_memory(*args: object) -> object:
        nonlocal num_draws
        num_draws += 1
        if num_draws == 3:
            raise MemoryError("no room for a sorted row")
        return draw(*args)

    with in_ranks(tmp_path, 1, stages=2) as loaded:
        config = msgspec.structs.replace(loaded.config, run_dir=str(make_run_dir()))
        driver, executor = CoreAndWorker(changed(config), loaded.worker), ExecutorLoop(config, loaded.worker)
        driver._apply(driver.engine.capacity(executor.capacity, 0))
        for i, each in enumerate(expectations):
            driver.admit(i, each.prompt, params)
        monkeypatch.setattr(owner, "draw", draw_once_without_memory)
        failures = []
        while driver.engine.num_live:
            while (plan := driver.engine.plan(0)) is not None:
                executor.send(plan)
            message = executor.expect(Capacity | StepResult)
            if isinstance(message, Capacity):
                failures.append(message.failure)
                driver._apply(driver.engine.capacity(message, 0))
            else:
                driver._apply(driver.engine.commit(message, 0))
        executor.close()
    assert failures == ["MemoryError: no room for a sorted row"]
    assert [driver.outputs[i] for i in range(len(expectations))] == [each.outputs for each in expectations]


def test_steps_in_flight_share_no_request(tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]
    in_flight: list[int] = []
    with in_ranks(tmp_path, 1, stages=2) as loaded:
        worker = loaded.worker
        assert isinstance(worker, PipelineWorker)
        begin = Pipeline.begin

        def watched(pipeline: Pipeline, rows, tables, settings):  # type: ignore[no-untyped-def]
            flight = begin(pipeline, rows, tables, settings)
            drawing = [step.rows.slots[step.rows.sampling].tolist() for step in worker._pending]
            drawing.append(rows.slots[rows.sampling].tolist())
            in_flight.append(len(drawing))
            slots = [slot for each in drawing for slot in each]
            assert len(slots) == len(set(slots)), drawing
            return flight

        with mock.patch.object(Pipeline, "begin", watched):
            run(loaded, changed(loaded.config), prompts)
    assert in_flight.count(2) > len(in_flight) / 2, in_flight


@pytest.mark.whole
def test_all_stages_swap_blocks_and_accept_embeds(tmp_path: Path) -> None:
    """Every other prompt is given as embeddings; KV memory is too small for all, so blocks are swapped out and in."""
    expected = made(ROWS["llama"], tmp_path)
    table = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    prompts = mixed(table, [each.prompt for each in expected])
    with in_ranks(tmp_path, 2, stages=2, swap_space=2**-10) as loaded:
        driver = CoreAndWorker(with_blocks(changed(loaded.config), few_blocks(loaded.config)), loaded.worker)
        for i, prompt in enumerate(prompts):
            driver.admit(i + 1, prompt, GREEDY)
        driver.run()
    assert [driver.outputs[i + 1] for i in range(len(prompts))] == [each.outputs for each in expected]
    assert driver.engine.state is not None and driver.engine.state.counters.swap_in_blocks > 0
