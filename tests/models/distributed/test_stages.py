"""A model whose layers are in stages gives the bits of one that is not, however its requests are computed."""

from __future__ import annotations

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
    WAYS,
    Loaded,
    alone,
    few_blocks,
    in_every_way,
    load,
    run,
    with_blocks,
)
from tests.models.random_checkpoints import NUM_TOKENS, Expectation, of_transformers
from tests.models.test_embeds import mixed
from tests.models.test_engine import House, changed
from tests.models.test_equal import ROWS, made

from quintet.core.token_messages import StepMessages
from quintet.executor.backends.cpu.program.kv import allocate_kv
from quintet.executor.distributed.parallel.boot import share_of_rank
from quintet.executor.distributed.parallel.pipeline import InFlightStep, Pipeline
from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.executor.interface import StepWorker
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.worker import make_torch_worker
from quintet.process.sockets import make_run_dir
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams
from quintet.wire.step import Capacity, StepResult

FAST = ("llama", "gpt2", "phi4 mini")
"""An output layer of its own; one that is the embedding, and learned positions; rotations that depend on a prompt's length."""


def check(loaded: Loaded, expected: list[Expectation], ways: dict[str, dict[str, int]]) -> None:
    """The tokens are the reference's, in every way."""
    prompts, outputs = [each.prompt for each in expected], [each.outputs for each in expected]
    for way, outcome in in_every_way(loaded, prompts, False, {"together": {}} | ways):
        assert outcome.outputs == outputs, way


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("stages", "size"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", FAST)
def test_tokens_are_those_of_one_process(name: str, stages: int, size: int, tmp_path: Path) -> None:
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, stages=stages) as loaded:
        check(loaded, expected, {"preemption": WAYS["preemption"]})


@pytest.mark.whole
@pytest.mark.parametrize("name", ROWS)
def test_every_family_that_is_cut(name: str, tmp_path: Path) -> None:
    expected = made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, 1, stages=2) as loaded:
        check(loaded, expected, WAYS)


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


class Heard(House):
    """Keeps the log-probabilities that were told, whichever step they came with."""

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self.drawn: list[tuple[int, bytes, bytes]] = []
        self.of_prompts: list[tuple[int, bytes, bytes]] = []
        super().__init__(config, worker)

    def _apply(self, effects: StepMessages) -> None:
        super()._apply(effects)
        for _, tokens in effects.tokens:
            self.drawn += [(each.rank, each.token_ids, each.logprobs) for each in tokens.logprobs]
            for told in tokens.prompt_logprobs:
                size = 4 * told.width
                self.of_prompts += [
                    (told.first + i, told.token_ids[at : at + size], told.logprobs[at : at + size])
                    for i, at in enumerate(range(0, len(told.token_ids), size))
                ]


def test_log_probabilities_have_the_bits_of_one_process(tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]
    params = msgspec.structs.replace(GREEDY, logprobs=3, prompt_logprobs=2)

    def told(loaded: Loaded) -> tuple[list[tuple[int, bytes, bytes]], list[tuple[int, bytes, bytes]]]:
        house = Heard(changed(loaded.config), loaded.worker)
        for i, prompt in enumerate(prompts):
            house.admit(i, prompt, params)
        house.run()
        return sorted(house.drawn), sorted(house.of_prompts)

    expected = told(load(tmp_path, "bfloat16"))
    assert len(expected[0]) == params.max_tokens * len(prompts)
    assert len(expected[1]) == sum(len(prompt) - 1 for prompt in prompts)
    with in_ranks(tmp_path, 1, "bfloat16", stages=2) as loaded:
        assert told(loaded) == expected


@pytest.mark.whole
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_gguf_is_cut(tied: bool, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    family = of_transformers("Qwen2Config", tie_word_embeddings=tied, **WIDE)
    expected = made(in_blocks(family, as_q4_k_m, file), tmp_path)
    with in_ranks(file, 1, stages=2) as loaded:
        check(loaded, expected, WAYS)


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
def test_what_is_drawn_is_the_same(params: SamplingParams, tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]
    whole = load(tmp_path, "bfloat16")
    expected = run(whole, changed(whole.config), prompts, params=params)
    with in_ranks(tmp_path, 1, "bfloat16", stages=2) as loaded:
        assert run(loaded, changed(loaded.config), prompts, params=params).outputs == expected.outputs


@pytest.mark.parametrize("name", ["gemma3", "qwen3 next"])
def test_stages_reserve_the_memory_that_was_asked_for(name: str, tmp_path: Path) -> None:
    """Their layers are in several groups, so a place may be of several stages."""
    made(ROWS[name], tmp_path)
    config = config_of(tmp_path, 1, 2, "float32", "none", "auto", None, experts=False)
    kv = config.model.kv
    assert len(kv.groups) > 1
    reserved = sum(
        sum(place.numel() for place in allocate_kv(kv, NUM_BLOCKS, 0, share_of_rank(config, rank)).places)
        for rank in range(2)
    )
    assert reserved == config.cache.memory_bytes == NUM_BLOCKS * kv.bytes_per_block


@pytest.mark.parametrize("stages", [2, 3])
def test_forms_hold_while_steps_with_and_without_them_are_under_way(stages: int, tmp_path: Path) -> None:
    """Every third request has no form, so that steps of all kinds are under way at once."""
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]

    def answers(loaded: Loaded) -> dict[int, list[int]]:
        house = House(changed(loaded.config), loaded.worker)
        for i, params in enumerate(byte_vocabulary.asked()):
            house.admit(i, prompts[i % len(prompts)][:8], params)
        house.run()
        return house.outputs

    def with_vocabulary(config: EngineConfig) -> EngineConfig:
        return byte_vocabulary.with_vocabulary(config, tmp_path)

    config = with_vocabulary(load(tmp_path, "float32").config)
    expected = answers(Loaded(config, make_torch_worker(config)))
    with in_ranks(tmp_path, 1, stages=stages, change=with_vocabulary) as loaded:
        together = answers(loaded)
    byte_vocabulary.check(together)
    assert together == expected


@pytest.mark.parametrize(
    ("params", "raises"),
    [(GREEDY, "pipeline"), (msgspec.structs.replace(GREEDY, logprobs=1), "sampler")],
    ids=["by the kernels", "by the sampler"],
)
def test_a_draw_that_raises_costs_the_others_nothing(
    params: SamplingParams, raises: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third draw of a run has no memory: the core hears so, and every request is computed to its end."""
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
        house, executor = House(changed(config), loaded.worker), ExecutorLoop(config, loaded.worker)
        house._apply(house.engine.capacity(executor.capacity, 0))
        for i, each in enumerate(expectations):
            house.admit(i, each.prompt, params)
        monkeypatch.setattr(owner, "draw", draw_once_without_memory)
        failures = []
        while house.engine.num_live:
            while (plan := house.engine.plan(0)) is not None:
                executor.send(plan)
            message = executor.expect(Capacity | StepResult)
            if isinstance(message, Capacity):
                failures.append(message.failure)
                house._apply(house.engine.capacity(message, 0))
            else:
                house._apply(house.engine.commit(message, 0))
        executor.close()
    assert failures == ["MemoryError: no room for a sorted row"]
    assert [house.outputs[i] for i in range(len(expectations))] == [each.outputs for each in expectations]


def test_steps_are_under_way_at_once_and_share_no_request(tmp_path: Path) -> None:
    prompts = [each.prompt for each in made(ROWS["llama"], tmp_path)]
    under_way: list[int] = []
    with in_ranks(tmp_path, 1, stages=2) as loaded:
        worker = loaded.worker
        assert isinstance(worker, PipelineWorker)
        begin = Pipeline.begin

        def watched(pipeline: Pipeline, rows, tables, settings):  # type: ignore[no-untyped-def]
            flight = begin(pipeline, rows, tables, settings)
            drawing = [step.rows.slots[step.rows.sampling].tolist() for step in worker._pending]
            drawing.append(rows.slots[rows.sampling].tolist())
            under_way.append(len(drawing))
            slots = [slot for each in drawing for slot in each]
            assert len(slots) == len(set(slots)), drawing
            return flight

        with mock.patch.object(Pipeline, "begin", watched):
            run(loaded, changed(loaded.config), prompts)
    assert under_way.count(2) > len(under_way) / 2, under_way


@pytest.mark.whole
def test_blocks_are_swapped_and_vectors_taken_by_all_stages(tmp_path: Path) -> None:
    """Every other prompt comes as vectors; KV memory is too little for all, and what goes to the host comes back."""
    expected = made(ROWS["llama"], tmp_path)
    table = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    prompts = mixed(table, [each.prompt for each in expected])
    with in_ranks(tmp_path, 2, stages=2, swap_space=2**-10) as loaded:
        house = House(with_blocks(changed(loaded.config), few_blocks(loaded.config)), loaded.worker)
        for i, prompt in enumerate(prompts):
            house.admit(i + 1, prompt, GREEDY)
        house.run()
    assert [house.outputs[i + 1] for i in range(len(prompts))] == [each.outputs for each in expected]
    assert house.engine.state is not None and house.engine.state.counters.swap_in_blocks > 0
