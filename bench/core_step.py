"""Time the core takes per step, without sockets: planning, encoding, committing a step's result, encoding its tokens.

    python bench/core_step.py [--steps 400] [--running 1 64 256 1024]

Every request decodes; results come back two plans later, as with a real executor. The garbage collector is frozen as
in the process. Prints one JSON object: medians in microseconds for each number of running requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import deque

from quintet.core.engine import Engine
from quintet.wire import codec
from quintet.wire.config import CacheConfig, ModelConfig, SchedulerConfig
from quintet.wire.kv_spec import full_layers
from quintet.wire.messages import Admit, Tokens
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.step import Capacity, StepPlan, StepResult

PROMPT_TOKENS, BLOCK_SIZE, MAX_LEN = 32, 16, 4096


def make_engine(num_running: int) -> Engine:
    """Return an engine with ``num_running`` requests admitted."""
    model = ModelConfig(
        path="",
        tokenizer_path="",
        served_names=["m"],
        architecture="",
        dtype="bfloat16",
        vocab_size=32_000,
        max_model_len=MAX_LEN,
        eos_token_ids=[2],
        kv=full_layers(1, 1, 1, 2, BLOCK_SIZE),
    )
    scheduler = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running))
    engine = Engine(model, CacheConfig(memory_bytes=0), scheduler)
    engine.capacity(Capacity(1, num_running * MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, num_running, MAX_LEN), 0)
    rng = random.Random(0)
    for request_id in range(num_running):
        prompt = codec.pack_i32(
            [rng.randrange(3, 32_000) for _ in range(PROMPT_TOKENS + rng.randrange(BLOCK_SIZE))]
        )
        params = SamplingParams(max_tokens=None, seed=request_id, ignore_eos=True)
        engine.admit(Admit(request_id, prompt, RequestSpec(params, 0, 0), 0), 0)
    return engine


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Return the medians over ``num_steps`` steps in which everybody decodes."""
    engine = make_engine(num_running)
    results: deque[StepResult] = deque()
    times: dict[str, list[int]] = {
        "plan": [],
        "encode_plan": [],
        "commit": [],
        "encode_tokens": [],
        "step": [],
    }
    clock = time.perf_counter_ns
    gc.collect()
    gc.freeze()
    while len(times["step"]) < num_steps:
        begin = clock()
        plan = engine.plan(begin)
        planned = clock()
        assert isinstance(plan, StepPlan)
        codec.encode(plan)
        encoded = clock()
        num_drawn = sum(plan.samples)
        results.append(StepResult(plan.step, 0, codec.pack_i32([5 + plan.step % 1000] * num_drawn)))
        if len(results) < 2:
            continue
        result = results.popleft()
        start = clock()
        effects = engine.commit(result, start)
        committed = clock()
        for _, tokens in effects.tokens:
            assert isinstance(tokens, Tokens)
            codec.encode(tokens)
        end = clock()
        if num_drawn == num_running and plan.step > 20:
            times["plan"].append(planned - begin)
            times["encode_plan"].append(encoded - planned)
            times["commit"].append(committed - start)
            times["encode_tokens"].append(end - committed)
            times["step"].append(encoded - begin + end - start)
    gc.unfreeze()
    figures = {f"{name}_us": round(statistics.median(values) / 1000, 1) for name, values in times.items()}
    return figures | {"step_p99_us": round(statistics.quantiles(times["step"], n=100)[98] / 1000, 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Time the core takes per step, by number of running requests."
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    arguments = parser.parse_args()
    report = {str(count): measure(count, arguments.steps) for count in arguments.running}
    json.dump({"core_step": report}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
