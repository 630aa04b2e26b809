"""Schedules of a family's equality tests: equal to its reference in fp32, and to itself bit by bit in other dtypes.

`Loaded` is a checkpoint in our worker; `run` sends prompts through the real core over it. Schedules: each prompt alone and
whole; all together; in chunks; twice, with prefix cache hits; with little KV memory, so that requests are preempted and
resumed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import msgspec
import numpy as np
import torch
from tests.models.random_checkpoints import NUM_TOKENS, Expectation
from tests.models.test_engine import CoreAndWorker, changed, without_prefix_cache
from tests.models.test_same_bits import LogitRecorder

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.cpu import backend as cpu_backend
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.registry import make_worker
from quintet.executor.worker import Worker
from quintet.wire.config import EngineConfig, Quantization
from quintet.wire.params import SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 96
NUM_BLOCKS = 512
RUN_DIR = Path(tempfile.gettempdir()) / "quintet-equal"
"""For configurations that start no processes: the path of a test's folder may be too long for their sockets."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0, ignore_eos=True)

Dtype = Literal["float32", "bfloat16", "float16"]
Bits = dict[tuple[int, int], bytes]
"""By request and position: the logits of the token drawn there."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker with the configuration that `serve` would have resolved."""

    config: EngineConfig
    worker: Worker


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run."""

    outputs: list[list[int]]
    """Tokens of each prompt, of the last round."""
    preemptions: int
    num_cached: int
    """Prefix cache hits in tokens, of all requests."""
    bits: Bits
    """Empty unless requested."""


def load(
    folder: Path,
    dtype: Dtype = "float32",
    quantization: Quantization = "none",
    compiled: bool = True,
    max_model_len: int = MAX_MODEL_LEN,
    **options: Any,
) -> Loaded:
    """Resolve a folder as `quintet serve` does, and load it. compiled: by the recorded program, else by torch."""
    submitted = Options(
        model=str(folder),
        dtype=dtype,
        quantization=quantization,
        device="cpu",
        max_model_len=max_model_len,
        max_num_seqs=16,
        block_size=BLOCK_SIZE,
        threads=1,
        kv_cache_memory="64MiB",
        **options,
    )
    config = with_blocks(resolve(submitted, RUN_DIR, http=False).config, NUM_BLOCKS)
    if not compiled:
        with mock.patch.object(cpu_backend, "program_library", lambda: None):
            worker = make_worker(config)
        assert not isinstance(worker.runner, ProgramRunner)
        return Loaded(config, worker)
    worker = make_worker(config)
    recorded = config.model.implementation == "quintet"
    assert isinstance(worker.runner, ProgramRunner) == recorded, "the compiled kernels do not take this model"
    return Loaded(config, worker)


def with_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """Return the configuration with this number of KV blocks."""
    cache = msgspec.structs.replace(config.cache, memory_bytes=num_blocks * config.model.kv.bytes_per_block)
    return msgspec.structs.replace(config, cache=cache)


def few_blocks(config: EngineConfig) -> int:
    """Return the number of blocks of one request of the longest kind, and a few more."""
    return (
        config.model.kv.most_blocks(config.model.max_model_len, config.scheduler.max_num_batched_tokens) + 2
    )


def run(
    loaded: Loaded,
    config: EngineConfig,
    prompts: Sequence[list[int]],
    rounds: int = 1,
    watched: bool = False,
    params: SamplingParams = GREEDY,
) -> Outcome:
    """Compute all prompts together, ``rounds`` times over. watched: keep the logits after every token."""
    witness = LogitRecorder(loaded.worker) if watched else None
    driver = CoreAndWorker(config, loaded.worker if witness is None else witness)  # type: ignore[arg-type]
    for round_ in range(rounds):
        for i, prompt in enumerate(prompts):
            driver.admit(1000 * round_ + i, prompt, params)
        driver.run()
    first = 1000 * (rounds - 1)
    assert driver.engine.state is not None
    return Outcome(
        [driver.outputs[first + i] for i in range(len(prompts))],
        driver.engine.state.counters.preemptions,
        sum(driver.cached.values()),
        {} if witness is None else {(k % 1000, at): bits for (k, at), bits in witness.release().items()},
    )


def alone(loaded: Loaded, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> Outcome:
    """Compute each prompt alone, in one chunk, without cached tokens; keep the logits."""
    outputs, bits = [], {}
    config = without_prefix_cache(changed(loaded.config))
    for i, prompt in enumerate(prompts):
        outcome = run(loaded, config, [prompt], watched=True, params=params)
        outputs += outcome.outputs
        bits |= {(i, at): value for (_, at), value in outcome.bits.items()}
    return Outcome(outputs, 0, 0, bits)


SCHEDULES: dict[str, dict[str, int]] = {
    "together": {},
    "chunks, prefix hits": {"max_num_batched_tokens": 23, "long_prefill_token_threshold": 7},
    "preemption": {"max_num_batched_tokens": 37},
}
MORE_SCHEDULES: dict[str, dict[str, int]] = SCHEDULES | {
    "synchronous": {"max_steps_in_flight": 1},
    "two at a time": {"max_num_seqs": 2},
    "one token at a time, prefix hits": {"long_prefill_token_threshold": 1},
    "preemption in chunks": {"max_num_batched_tokens": 13, "long_prefill_token_threshold": 5},
}
"""Settings of the core by name. Prefix cache hits need two rounds; preemption needs few blocks."""


def run_schedules(
    loaded: Loaded,
    prompts: Sequence[list[int]],
    watched: bool,
    schedules: dict[str, dict[str, int]] = SCHEDULES,
) -> Iterator[tuple[str, Outcome]]:
    """Run the prompts in each schedule, and check that it happened."""
    for name, settings in schedules.items():
        config = changed(loaded.config, **settings)
        if "preemption" in name:
            config = with_blocks(config, few_blocks(config))
        hits = "prefix hits" in name
        outcome = run(loaded, config, prompts, 2 if hits else 1, watched)
        runs_out = "preemption" in name and any(group.kind == "full" for group in config.model.kv.groups)
        assert runs_out <= (outcome.preemptions > 0) <= ("preemption" in name), (name, outcome.preemptions)
        assert not hits or outcome.num_cached > 0, name
        yield name, outcome


def logits_of(outcome: Outcome, request: int, num_prompt: int) -> torch.Tensor:
    """Return the fp32 ``[NUM_TOKENS, vocabulary]`` bits that a run kept."""
    rows = [outcome.bits[request, num_prompt + i] for i in range(NUM_TOKENS)]
    return torch.stack([torch.from_numpy(np.frombuffer(row, np.float32).copy()) for row in rows])


def max_difference(outcome: Outcome, expected: Sequence[Expectation]) -> float:
    """Return the largest difference of any logit from the reference's, in deviations of its row."""
    most = 0.0
    for i, each in enumerate(expected):
        apart = (logits_of(outcome, i, len(each.prompt)) - each.logits).abs().amax(-1)
        most = max(most, float((apart / each.logits.std(-1)).max()))
    return most


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Leave the other core to concurrent tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
