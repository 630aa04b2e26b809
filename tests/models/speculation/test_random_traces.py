"""Random requests in random schedules: outputs and log-probabilities with drafts are those without, bit for bit.

While steps are in flight, requests arrive, are canceled or stopped, blocks are swapped, and executors are lost.
"""

from __future__ import annotations

import functools
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from tests.models import byte_vocabulary
from tests.models.equality import few_blocks, load, with_blocks
from tests.models.kv.test_swapping import with_host_memory
from tests.models.random_checkpoints import write_checkpoint
from tests.models.small_models import FAMILIES
from tests.models.speculation.draft_heads import Head, eagle3_head, eagle_head, medusa_heads, with_head
from tests.models.speculation.longest_drafts import choice_of, drafting
from tests.models.speculation.mtp_checkpoints import write
from tests.models.speculation.test_bits import DRAFTS, Oracle, Recorder
from tests.models.speculation.test_draft_model import saved, with_draft
from tests.models.speculation.test_structured import budget, reasoned
from tests.models.test_engine import changed, without_prefix_cache
from tests.models.test_equal import ROWS

from quintet.core import recurrent_state
from quintet.core.token_messages import StepMessages
from quintet.executor.backends.registry import make_worker
from quintet.executor.backends.torch.eager import EagerRunner
from quintet.executor.interface import Pending, StepWorker
from quintet.executor.speculation.draft_model import DraftModel
from quintet.executor.speculation.drafters import Drafter, DraftRows
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.worker import Worker
from quintet.wire.codec import pack_i32, unpack_i64
from quintet.wire.config import EngineConfig, SpeculativeConfig
from quintet.wire.messages import Admit
from quintet.wire.params import RepetitionDetectionParams, SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.step import Capacity

NUM_REQUESTS = 10


@dataclass
class Sent:
    prompt: list[int]
    params: SamplingParams
    bad_word_ids: list[list[int]]
    priority: int


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    """Return any combination of parameters."""
    max_tokens = rng.randint(1, 40)
    fields: dict[str, Any] = {
        "seed": seed,
        "max_tokens": max_tokens,
        "temperature": rng.choice([0.0, 0.6, 1.0, 1.4]),
    }
    choices: dict[str, Callable[[], Any]] = {
        "top_p": lambda: 0.9,
        "top_k": lambda: 20,
        "min_p": lambda: 0.02,
        "presence_penalty": lambda: 0.7,
        "frequency_penalty": lambda: 0.3,
        "repetition_penalty": lambda: 1.2,
        "logit_bias": lambda: {rng.randrange(200): 3.0 for _ in range(4)},
        "allowed_token_ids": lambda: rng.sample(range(201), 60),
        "min_tokens": lambda: rng.randint(0, max_tokens),
        "stop_token_ids": lambda: rng.sample(range(200), 12),
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.choice([0, 3]),
        "prompt_logprobs": lambda: 1,
        "repetition_detection": lambda: RepetitionDetectionParams(max_pattern_size=3, min_count=2),
        "thinking_bound": lambda: budget(rng.randint(0, 6), is_open=rng.random() < 0.5),
        "structured_outputs": lambda: rng.choice(
            [*map(byte_vocabulary.form, byte_vocabulary.PATTERNS), reasoned(byte_vocabulary.PATTERNS[1])]
        ),
    }
    fields |= {name: choose() for name, choose in choices.items() if rng.random() < 0.25}
    if fields["temperature"] and rng.random() < 0.3:
        fields["n"] = rng.randint(2, 3)
    return SamplingParams(**fields)


def random_requests(rng: random.Random) -> list[Sent]:
    """Return requests of which many share a prefix."""
    stems = [[rng.randrange(200) for _ in range(50)] for _ in range(2)]
    return [
        Sent(
            [*rng.choice(stems)[: rng.randint(1, 49)], rng.randrange(200)],
            random_params(rng, seed),
            [rng.sample(range(200), rng.randint(1, 2)) for _ in range(rng.choice([0, 0, 0, 9]))],
            rng.randint(-1, 1),
        )
        for seed in range(NUM_REQUESTS)
    ]


def random_config(rng: random.Random, config: EngineConfig) -> EngineConfig:
    """Return a schedule: chunks, preemption, swapping, cached prefixes, steps in flight."""
    config = changed(
        config,
        max_steps_in_flight=rng.randint(1, 3),
        max_num_seqs=rng.choice([2, 8]),
        max_num_batched_tokens=rng.choice([17, 64]),
        long_prefill_token_threshold=rng.choice([0, 5]),
        policy=rng.choice(["fcfs", "priority"]),
    )
    config = with_blocks(config, few_blocks(config)) if rng.random() < 0.5 else config
    if rng.random() < 0.6:
        config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, swap_bytes=0))
    return config if rng.random() < 0.7 else without_prefix_cache(config)


class Trace(Recorder):
    """Requests that arrive or end during the run, and an executor that is lost."""

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self.prompt_logprobs: dict[int, tuple[bytes, bytes]] = {}
        self.ended_early = set[int]()
        """Ids of all choices of canceled and stopped requests."""
        self._config, self._epoch = config, 1
        super().__init__(config, worker)

    def _apply(self, effects: StepMessages) -> None:
        super()._apply(effects)
        for _, tokens in effects.tokens:
            request_ids = unpack_i64(tokens.request_ids)
            for entry in tokens.prompt_logprobs:
                if request_ids[entry.row] % 10:
                    continue  # further choices have them only if they are recomputed
                values, ids = self.prompt_logprobs.get(request_ids[entry.row], (b"", b""))
                known = values + entry.logprobs, ids + entry.token_ids
                self.prompt_logprobs[request_ids[entry.row]] = known

    def send(self, request_id: int, sent: Sent) -> None:
        admit = Admit(
            request_id,
            pack_i32(sent.prompt),
            RequestSpec(sent.params, 0, 0, priority=sent.priority),
            0,
            bad_word_ids=sent.bad_word_ids,
        )
        self._apply(self.engine.admit(admit, 0))

    def lose_executor(self) -> None:
        self._epoch += 1
        self.worker.reset()
        kv, limits = (
            self._config.model.kv,
            (self._config.scheduler.max_num_seqs, self._config.model.max_model_len),
        )
        num_blocks = self._config.cache.memory_bytes // kv.bytes_per_block
        capacity = Capacity(self._epoch, num_blocks, self.block_size, *limits)
        capacity.num_host_blocks = self.worker.num_host_blocks
        self._apply(self.engine.capacity(capacity, 0))

    def end_early(self, rng: random.Random) -> None:
        """Cancel all choices of a live request, or end them as the detokenizer does after a stop string."""
        live_ids = list(self.engine.live)
        first = rng.choice(live_ids) // 10 * 10
        choices = [request_id for request_id in live_ids if request_id // 10 * 10 == first]
        self.ended_early.update(range(first, first + 10))
        if rng.random() < 0.5:
            self._apply(self.engine.cancel(choices, 0))
        else:
            self.engine.stop_hit(choices, [0] * len(choices), 0)

    def play(self, requests: list[Sent], rng: random.Random) -> None:
        """Run everything, in a random order of events."""
        waiting = deque(enumerate(requests))
        flight: deque[Pending] = deque()
        while waiting:
            roll = rng.random()
            if roll < 0.1:
                number, sent = waiting.popleft()
                self.send(10 * number + 10, sent)
            elif roll < 0.12 and self._epoch < 3:  # a request that loses more executors is rejected
                self.lose_executor()
                flight.clear()
            elif roll < 0.135 and self.engine.num_live:
                self.end_early(rng)
            elif roll < 0.6:
                plan = self.engine.plan(0)
                if plan is not None:
                    flight.append(self.worker.begin(plan))
            elif flight:
                self._apply(self.engine.commit(flight.popleft().result(), 0))
        while flight:
            self._apply(self.engine.commit(flight.popleft().result(), 0))
        self.run()


class Mixed(Oracle):
    """Replaces half of the drafts of a drafter, which sees all steps."""

    def __init__(self, worker: Any, sequences: list[list[int]], drafter: Drafter) -> None:
        super().__init__(worker, sequences)
        self.end, self.note = drafter.end, drafter.note  # type: ignore[method-assign]
        self.observe, self.note_computed = drafter.observe, drafter.note_computed  # type: ignore[method-assign, assignment]
        self._drafter, self.reads_steps = drafter, drafter.reads_steps

    def propose(self, rows: DraftRows) -> list[Tokens]:
        pairs = zip(self._drafter.propose(rows), super().propose(rows), strict=True)
        return [self._rng.choice(pair) for pair in pairs]


def drafts_with(rng: random.Random, worker: Any, plain: Trace, requests: list[Sent]) -> None:
    """Propose a random number of drafts: those of the worker's method, or of an earlier run."""
    speculation = worker._speculation
    assert speculation is not None
    draws = np.random.default_rng(rng.randrange(1 << 30))
    speculation._lengths.choose = lambda slots, most, *_: choice_of(slots, draws.integers(0, most + 1))  # type: ignore[method-assign]
    speculation._lengths.is_due = lambda **_: speculation._lengths._num_steps % 5 < 3  # type: ignore[method-assign]
    sequences = [requests[key // 10 - 1].prompt + outputs for key, outputs in plain.outputs.items()]
    drafter = speculation.drafter
    if drafter.reads_steps and not isinstance(drafter, Mixed):
        speculation.drafter = Mixed(worker, sequences, drafter)
    elif not isinstance(drafter, Mixed) and rng.random() < 0.7:
        speculation.drafter = Oracle(worker, sequences)


def check_any_schedule(
    rng: random.Random,
    plain_config: EngineConfig,
    config: EngineConfig,
    make: Callable[[EngineConfig], Any] = make_worker,
) -> None:
    """Compare random requests in random schedules of ``config``, which has drafts, with those of ``plain_config``."""
    requests = random_requests(rng)
    plain = Trace(plain_config, make(plain_config))
    for number, sent in enumerate(requests):
        plain.send(10 * number + 10, sent)
    plain.run()
    config = with_host_memory(config)
    worker = drafting(make(config))
    for _ in range(3):
        drafts_with(rng, worker, plain, requests)
        found = Trace(random_config(rng, config), worker)
        found.play(requests, rng)
        assert_same(found, plain)


def assert_same(found: Trace, plain: Trace) -> None:
    """Compare with a run in which no request is canceled or stopped. Those have the beginning of its outputs."""
    lists, whole = ["outputs", "logprobs"], ["endings", "prompt_logprobs"]
    if isinstance(found.worker, Worker) and isinstance(found.worker.runner, EagerRunner):
        lists, whole = lists[:1], whole[:1]  # torch's bits depend on the batch
    for name in lists + whole:
        own, expected = (
            {key: value for key, value in getattr(trace, name).items() if key not in found.ended_early}
            for trace in (found, plain)
        )
        assert own == expected, name
    for name in lists:
        own, expected = getattr(found, name), getattr(plain, name)
        for key in found.ended_early & own.keys():
            assert own[key] == expected[key][: len(own[key])], name


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("family", ["llama-gqa-biases", "mistral-window"])
@pytest.mark.parametrize("serve", [16], indirect=True)
def test_any_request_in_any_schedule(
    family: str, seed: int, serve: Callable[..., Any], tmp_path: Path
) -> None:
    rng = random.Random(seed)
    served = serve(FAMILIES[family](), max_model_len=96)
    config = byte_vocabulary.with_vocabulary(changed(served.config, max_num_seqs=8), tmp_path)
    method = rng.choice(["ngram", "suffix"])
    speculative = msgspec.structs.replace(DRAFTS, method=method, prompt_lookup_min=1)
    assert isinstance(speculative, SpeculativeConfig)
    check_any_schedule(rng, config, changed(config, speculative=speculative))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "make", [eagle_head, eagle3_head, functools.partial(eagle3_head, token_map=True), medusa_heads]
)
@pytest.mark.parametrize("serve", [16], indirect=True)
def test_any_request_in_any_schedule_with_a_head(
    make: Callable[[], Head],
    seed: int,
    serve: Callable[..., Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    config = byte_vocabulary.with_vocabulary(changed(served.config, max_num_seqs=8), tmp_path)
    drafting = with_head(config, tmp_path_factory.mktemp("head"), make())
    check_any_schedule(random.Random(seed), config, drafting)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama-gqa-biases", "qwen2-window"])
@pytest.mark.parametrize("serve", [16], indirect=True)
def test_any_request_in_any_schedule_with_a_draft_model(
    family: str,
    seed: int,
    serve: Callable[..., Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    served = serve(FAMILIES[family](), max_model_len=96)
    config = byte_vocabulary.with_vocabulary(changed(served.config, max_num_seqs=8), tmp_path)
    draft = saved(tmp_path_factory.mktemp("draft"), num_hidden_layers=2)
    with mock.patch.object(DraftModel, "reads_steps", True):  # not replaced by other drafters
        check_any_schedule(random.Random(seed), config, with_draft(config, draft))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("name", ["qwen 3.5", "falcon h1", "mamba", "lfm2", "gemma3", "gpt-oss"])
def test_any_request_in_any_schedule_with_states_or_windows(
    name: str, method: str, seed: int, tmp_path: Path
) -> None:
    write_checkpoint(ROWS[name], tmp_path)
    check_folder(tmp_path, method, seed)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["mimo", "deepseek v3", "k-exaone", "qwen3 next"])
def test_any_request_in_any_schedule_with_a_prediction_layer(kind: str, seed: int, tmp_path: Path) -> None:
    write(kind, tmp_path)
    check_folder(tmp_path, "mtp", seed)


def check_folder(folder: Path, method: str, seed: int) -> None:
    """Check a checkpoint with the configuration that the server resolves."""
    flag = json.dumps({"method": method, "num_speculative_tokens": 6})
    with mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        configs = load(folder).config, load(folder, speculative_config=flag).config
        plain, config = (
            byte_vocabulary.with_vocabulary(changed(each, max_num_seqs=8), folder) for each in configs
        )
        check_any_schedule(random.Random(seed), plain, config)
