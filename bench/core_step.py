"""Measure the core's time per step, without sockets: plan, encode the plan, commit the result, encode the tokens.

    python bench/core_step.py [--steps 400] [--running 1 64 256 1024] [--drafts 8]

All requests decode. A result arrives two plans later, as from a real executor. The garbage collector is frozen, as in the core
process. Prints one JSON object: medians in microseconds for each number of running requests.

``request_us`` is CPU time per request from admission to end, with 32 to 47 prompt tokens and 2 output tokens. It is the minimum
over waves of that many requests, since other load can only make a wave slower.

With --drafts, each row may verify that many draft tokens, but the executor proposes none.
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
from quintet.wire.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from quintet.wire.kv_spec import full_layers
from quintet.wire.messages import Admit, Tokens
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.step import Capacity, StepPlan, StepResult

PROMPT_TOKENS, NUM_OUTPUTS, BLOCK_SIZE, MAX_LEN = 32, 2, 16, 4096


def make_engine(num_running: int, num_slots: int | None = None, num_drafts: int = 0) -> Engine:
    """Return an engine with ``num_running`` admitted requests and ``num_slots`` slots (default: ``num_running``)."""
    num_slots = num_slots or num_running
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
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None
    scheduler = SchedulerConfig(
        max_num_seqs=num_slots, max_num_batched_tokens=max(8192, num_slots), speculative=speculative
    )
    engine = Engine(model, CacheConfig(memory_bytes=0), scheduler)
    engine.capacity(Capacity(1, num_slots * MAX_LEN // BLOCK_SIZE, BLOCK_SIZE, num_slots, MAX_LEN), 0)
    for admit in random_admissions(0, num_running, None):
        engine.admit(admit, 0)
    return engine


def random_admissions(first_id: int, count: int, max_tokens: int | None) -> list[Admit]:
    """Return admissions of random requests without a common prefix."""
    rng = random.Random(first_id)
    found = []
    for request_id in range(first_id, first_id + count):
        prompt = codec.pack_i32(
            [rng.randrange(3, 32_000) for _ in range(PROMPT_TOKENS + rng.randrange(BLOCK_SIZE))]
        )
        params = SamplingParams(max_tokens=max_tokens, seed=request_id, ignore_eos=True)
        found.append(Admit(request_id, prompt, RequestSpec(params, 0, 0), 0))
    return found


def request_us(num_running: int, num_waves: int = 40) -> float:
    """Return the CPU time of a request from its admission to its end, in microseconds."""
    engine, waves = make_engine(0, num_running), []
    for wave in range(num_waves):
        admits = random_admissions(wave * num_running, num_running, NUM_OUTPUTS)
        gc.collect()
        gc.freeze()
        began = time.process_time_ns()
        for admit in admits:
            engine.admit(admit, began)
        while isinstance(plan := engine.plan(began), StepPlan):
            codec.encode(plan)
            token_ids = codec.pack_i32([5 + wave] * sum(plan.samples))
            for _, tokens in engine.commit(StepResult(plan.step, 0, token_ids), began).tokens:
                codec.encode(tokens)
        waves.append((time.process_time_ns() - began) / num_running / 1000)
        assert not engine.num_live, f"{engine.num_live} requests of wave {wave} have not ended"
    gc.unfreeze()
    return round(min(waves), 1)


def measure(num_running: int, num_steps: int, num_drafts: int = 0) -> dict[str, float]:
    """Return the medians over ``num_steps`` decode steps of all requests."""
    engine = make_engine(num_running, num_drafts=num_drafts)
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
        result = StepResult(plan.step, 0, codec.pack_i32([5 + plan.step % 1000] * num_drawn))
        if num_drafts:
            result.num_tokens, result.num_drafts = b"\1" * num_drawn, bytes(num_drawn)
        results.append(result)
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
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description="Measure the core's time per step, by number of running requests."
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--drafts", type=int, default=0)
    arguments = parser.parse_args()
    report = {
        str(count): measure(count, arguments.steps, arguments.drafts) | {"request_us": request_us(count)}
        for count in arguments.running
    }
    json.dump({"core_step": report}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
