"""One engine of the fleet: the real core, and an executor that only takes time.

A *grain* is how many tokens stand for one: with 1 the core plans every step as it would; with more it plans coarse steps, of
as many real ones, in which a decoding request gets as many tokens as a grain has. The scheduler is the same, and sees fewer
and longer steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bench.fleet.traces import Trace
from quintet.core.engine import Engine
from quintet.wire import codec
from quintet.wire.config import CacheConfig, ModelConfig, SchedulerConfig
from quintet.wire.kv_spec import full_layers
from quintet.wire.messages import Admit
from quintet.wire.params import SamplingParams
from quintet.wire.request import RequestSpec
from quintet.wire.step import Capacity, StepResult

BLOCK_SIZE = 8
"""Of the core, in grains."""
MAX_LEN = 1 << 17
ANSWER_ID = 5
"""Every token that is drawn."""
MAX_RUNNING, BUDGET = 256, 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """Durations of an engine, in microseconds, and its capacity."""

    weights_us: float
    """Reading all weights once."""
    token_us: float
    """Multiplying one token with them."""
    key_us: float
    """Reading one key and value, for a row that decodes."""
    pair_us: float
    """One token of a prompt looking at one key."""
    kv_tokens: int

    def step_us(self, num_tokens: int, num_keys: int = 0, num_pairs: int = 0) -> float:
        """Return how long one step takes: weights are read while tokens are multiplied, as far as that goes."""
        compute_us = num_tokens * self.token_us
        return math.hypot(self.weights_us, compute_us) + num_keys * self.key_us + num_pairs * self.pair_us


H100_8B = Machine(weights_us=6_000, token_us=30, key_us=0.045, pair_us=0.001, kv_tokens=480_000)
"""8 G parameters and KV of 128 KiB a token, bf16, at 80 % of an H100's 3.35 TB/s and half of its 990 TFLOP/s. From the data
sheet: no such engine was measured."""

_MODEL = ModelConfig(
    path="", tokenizer_path="", served_names=["m"], architecture="", dtype="bfloat16", vocab_size=32_000,
    max_model_len=MAX_LEN, eos_token_ids=[2], kv=full_layers(1, 1, 1, 2, BLOCK_SIZE),
)  # fmt: skip


def prompt_ids(trace: Trace, at: int, grain: int) -> bytes:
    """Return the prompt of a request, an id a grain: what is shared, what is its conversation's own, and the answers in it."""
    num_shared, num_own = int(trace.num_shared[at]) // grain, int(trace.num_own[at]) // grain
    ids = np.empty(num_shared + num_own, np.int32)
    ids[:num_shared] = np.arange(num_shared) + (int(trace.shared[at]) << 15)
    own = ids[num_shared:]
    own[:] = np.arange(num_own) - (int(trace.conversation[at]) * (MAX_LEN // grain)) % (1 << 31)
    for begin, end in trace.answers[at]:
        own[begin // grain : end // grain] = ANSWER_ID
    return ids.tobytes()


@dataclass(slots=True)
class Done:
    """Result of a step."""

    firsts: list[tuple[int, float]]
    """Requests with their first token, and its time."""
    ended: list[int]


class SimulatedEngine:
    """A core and its executor. Times are in seconds."""

    def __init__(self, machine: Machine, grain: int) -> None:
        self._machine, self._grain = machine, grain
        self.slowness = 1.0
        """Multiple of the nominal duration of each step."""
        self._arrived_s: dict[int, float] = {}
        """Of requests that have not begun."""
        self._free_s = 0.0
        """End of the last prompt, as prompts follow each other in real steps."""
        self._begun_s = 0.0
        self._result: StepResult | None = None
        self._firsts: list[tuple[int, float]] = []
        self.num_cached = 0
        """Prompt tokens found, of all requests and of former lives."""
        self.num_steps = 0
        self._core = self._new_core()

    def _new_core(self) -> Engine:
        scheduler = SchedulerConfig(
            max_num_seqs=MAX_RUNNING, max_num_batched_tokens=BUDGET, max_steps_in_flight=1
        )
        core = Engine(_MODEL, CacheConfig(memory_bytes=0), scheduler)
        num_blocks = self._machine.kv_tokens // (self._grain * BLOCK_SIZE)
        core.capacity(Capacity(1, num_blocks, BLOCK_SIZE, MAX_RUNNING, MAX_LEN // self._grain), 0)
        return core

    @property
    def is_busy(self) -> bool:
        """True while a step is in flight."""
        return self._result is not None

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot."""
        assert self._core.state is not None
        return len(self._core.state.waiting)

    @property
    def num_running(self) -> int:
        """Requests that have one."""
        assert self._core.state is not None
        return len(self._core.state.running)

    @property
    def kv_tokens(self) -> int:
        """That its KV memory holds."""
        return self._machine.kv_tokens

    @property
    def kv_usage(self) -> float:
        """Share of its KV memory that requests take."""
        assert self._core.state is not None
        pool = self._core.state.pool
        return pool.num_used / pool.num_blocks

    @property
    def num_preemptions(self) -> int:
        """Requests that lost their slot for others, in this life."""
        assert self._core.state is not None
        return self._core.state.counters.preemptions

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache so far."""
        assert self._core.state is not None
        return self.num_cached + self._grain * self._core.state.counters.prompt_tokens_cached

    def admit(
        self, request_id: int, prompt: bytes, num_outputs: int, num_received: int, attempt: int, now_s: float
    ) -> None:
        """Take an attempt at a request of so many output tokens, some of which its client has received."""
        now_ns, grain = int(now_s * 1e9), self._grain
        # The first comes with the prompt's last step, which is one step: the others are as many as in real ones.
        max_tokens = num_outputs // grain + (grain > 1)
        params = SamplingParams(max_tokens=max_tokens, seed=request_id, ignore_eos=True)
        received = codec.pack_i32([ANSWER_ID] * (num_received // grain))
        spec = RequestSpec(params, now_ns, 0, output_ids=received, attempt=attempt)
        effects = self._core.admit(Admit(request_id, prompt, spec, now_ns), now_ns)
        assert not effects.failed, effects.failed
        self._arrived_s[request_id] = now_s

    def drop(self, request_id: int, now_s: float) -> None:
        """Forget a request after its client has left."""
        self._arrived_s.pop(request_id, None)
        self._core.drop([request_id], int(now_s * 1e9))

    def die(self) -> None:
        """Lose everything, and begin anew."""
        self.num_cached = self.cached_tokens
        self._core = self._new_core()
        self._arrived_s.clear()
        self._result = None

    def outputs_of(self, request_id: int) -> int:
        """Return the number of tokens that the client of a live request has received."""
        assert self._core.state is not None
        return self._grain * self._core.state.live[request_id].num_outputs

    def found_of(self, request_id: int) -> int:
        """Return the prompt tokens that a live request found in the cache."""
        assert self._core.state is not None
        return self._grain * self._core.state.live[request_id].stats.num_cached

    def begin(self, now_s: float) -> float | None:
        """Plan a step and return when it ends; None where there is nothing to compute."""
        plan = self._core.plan(int(now_s * 1e9))
        if plan is None:
            return None
        state = self._core.state
        assert state is not None
        grain, machine = self._grain, self._machine
        rows = state.in_flight[-1].rows
        starts, counts = codec.unpack_i32(plan.starts), codec.unpack_i32(plan.counts)
        num_keys = num_pairs = num_new = num_decoding = 0
        prompts: list[tuple[int, int, bool]] = []
        for row, start, count, samples in zip(rows, starts, counts, plan.samples, strict=True):
            if count == 1 and row.num_outputs:
                num_decoding += 1
                num_keys += start * grain
            else:
                num_new += count * grain
                num_pairs += count * grain * (start + count // 2) * grain
                prompts.append((row.request_id, count * grain, bool(samples) and not row.num_outputs))
        took_s = 1e-6 * self.slowness * self._took_us(num_decoding, num_new, num_keys, num_pairs)
        end_s = now_s + took_s
        full_us = machine.step_us(num_decoding + BUDGET, num_keys, num_pairs * BUDGET // max(BUDGET, num_new))
        full_s = 1e-6 * self.slowness * full_us
        self._note_firsts(prompts, now_s, end_s, full_s)
        self._begun_s = now_s
        self.num_steps += 1
        drawn = codec.pack_i32([ANSWER_ID] * sum(plan.samples))
        self._result = StepResult(plan.step, int(end_s * 1e9), drawn, compute_ns=int(took_s * 1e9))
        return end_s

    def _took_us(self, num_decoding: int, num_new: int, num_keys: int, num_pairs: int) -> float:
        """Return how long the real steps take that this one stands for: prompts fill the first of them."""
        num_full, rest = divmod(num_new, BUDGET)
        step_us = self._machine.step_us
        took_us = num_full * step_us(num_decoding + BUDGET, num_keys) + num_pairs * self._machine.pair_us
        if rest:
            took_us += step_us(num_decoding + rest, num_keys)
        num_others = (self._grain if num_decoding else 0) - num_full - (rest > 0)
        return took_us + max(0, num_others) * step_us(num_decoding, num_keys)

    def _note_firsts(
        self, prompts: list[tuple[int, int, bool]], now_s: float, end_s: float, full_s: float
    ) -> None:
        """Work out when first tokens come in a coarse step: prompts follow each other as they would in the real ones.

        A request that arrives during the coarse step before this one would have begun in that.
        """
        self._firsts = []
        free_s = self._free_s
        for request_id, num_tokens, is_last in prompts:
            came_s = self._arrived_s.get(request_id, now_s)
            least_s = came_s if self._grain > 1 and came_s > self._begun_s else now_s
            free_s = max(least_s, free_s) + full_s * max(1.0, num_tokens / BUDGET)
            if is_last:
                self._arrived_s.pop(request_id, None)
                self._firsts.append((request_id, min(free_s, end_s) if self._grain > 1 else end_s))
        self._free_s = min(free_s, end_s)

    def end(self, now_s: float) -> Done:
        """Commit the step in flight."""
        result, self._result = self._result, None
        assert result is not None
        ended = []
        for _, tokens in self._core.commit(result, int(now_s * 1e9)).tokens:
            if any(tokens.finishes):
                ids = codec.unpack_i64(tokens.request_ids)
                ended += [ids[row] for row, finish in enumerate(tokens.finishes) if finish]
        return Done(self._firsts, ended)
