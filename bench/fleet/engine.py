"""Simulated engine: the real core, and an executor that only advances the virtual clock.

The simulation treats ``grain`` tokens as one. With a grain of 1 the core plans each step. With a larger grain it plans coarse
steps, each of which stands for ``grain`` real steps and gives a decoding request ``grain`` tokens. The scheduler is the same and
sees fewer, longer steps.
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
"""Block size of the core, in grains."""
MAX_LEN = 1 << 17
ANSWER_ID = 5
"""Id of all output tokens."""
MAX_RUNNING, MAX_BATCHED_TOKENS = 256, 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """Times of an engine, in microseconds, and its KV memory, in tokens."""

    weights_us: float
    """Reading all weights once."""
    token_us: float
    """Multiplying one token with them."""
    key_us: float
    """Reading one key and value, for a decoding row."""
    pair_us: float
    """Attention of one prompt token to one key."""
    kv_tokens: int

    def step_us(self, num_tokens: int, num_keys: int = 0, num_pairs: int = 0) -> float:
        """Return the time of a step; reads of weights and multiplications overlap in part."""
        compute_us = num_tokens * self.token_us
        return math.hypot(self.weights_us, compute_us) + num_keys * self.key_us + num_pairs * self.pair_us


H100_8B = Machine(weights_us=6_000, token_us=30, key_us=0.045, pair_us=0.001, kv_tokens=480_000)
"""8 G parameters in bf16 and 128 KiB of KV per token, at 80 % of an H100's 3.35 TB/s and half of its 990 TFLOP/s. Computed from
the data sheet, not measured."""

_MODEL = ModelConfig(
    path="", tokenizer_path="", served_names=["m"], architecture="", dtype="bfloat16", vocab_size=32_000,
    max_model_len=MAX_LEN, eos_token_ids=[2], kv=full_layers(1, 1, 1, 2, BLOCK_SIZE),
)  # fmt: skip


def prompt_ids(trace: Trace, index: int, grain: int) -> bytes:
    """Return the prompt of a request, one id per grain: the shared prefix, then the conversation with earlier responses."""
    num_shared, num_own = int(trace.num_shared[index]) // grain, int(trace.num_own[index]) // grain
    ids = np.empty(num_shared + num_own, np.int32)
    ids[:num_shared] = np.arange(num_shared) + (int(trace.shared[index]) << 15)
    own = ids[num_shared:]
    own[:] = np.arange(num_own) - (int(trace.conversation[index]) * (MAX_LEN // grain)) % (1 << 31)
    for begin, end in trace.answers[index]:
        own[begin // grain : end // grain] = ANSWER_ID
    return ids.tobytes()


@dataclass(slots=True)
class StepEvents:
    """Requests with a first token in a step, and requests that ended."""

    first_tokens: list[tuple[int, float]]
    """Request id and time in seconds."""
    ended: list[int]
    """Request ids."""


class SimulatedEngine:
    """A core and its simulated executor. Times are in seconds."""

    def __init__(self, machine: Machine, grain: int) -> None:
        self._machine, self._grain = machine, grain
        self.slowness = 1.0
        """Factor of the time of each step."""
        self._arrived_s: dict[int, float] = {}
        """Arrival times of requests without a first token."""
        self._free_s = 0.0
        """End of the last prefill; prefills run one after another in real steps."""
        self._begin_s = 0.0
        self._result: StepResult | None = None
        self._first_tokens: list[tuple[int, float]] = []
        self.num_cached = 0
        """Prompt tokens of prefix cache hits before the last restart."""
        self.num_steps = 0
        self._core = self._new_core()

    def _new_core(self) -> Engine:
        scheduler = SchedulerConfig(
            max_num_seqs=MAX_RUNNING, max_num_batched_tokens=MAX_BATCHED_TOKENS, max_steps_in_flight=1
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
        """Number of waiting requests."""
        assert self._core.state is not None
        return len(self._core.state.waiting)

    @property
    def num_running(self) -> int:
        """Number of requests with a slot."""
        assert self._core.state is not None
        return len(self._core.state.running)

    @property
    def kv_tokens(self) -> int:
        """Capacity of KV memory, in tokens."""
        return self._machine.kv_tokens

    @property
    def kv_usage(self) -> float:
        """Used share of KV memory."""
        assert self._core.state is not None
        pool = self._core.state.pool
        return pool.num_used / pool.num_blocks

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the last restart."""
        assert self._core.state is not None
        return self._core.state.counters.preemptions

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of prefix cache hits so far."""
        assert self._core.state is not None
        return self.num_cached + self._grain * self._core.state.counters.prompt_tokens_cached

    def admit(
        self, request_id: int, prompt: bytes, num_outputs: int, num_received: int, attempt: int, now_s: float
    ) -> None:
        """Admit a request of ``num_outputs`` output tokens, of which the client has received ``num_received``."""
        now_ns, grain = int(now_s * 1e9), self._grain
        # The first token needs no decode step: the last prefill step samples it.
        max_tokens = num_outputs // grain + (grain > 1)
        params = SamplingParams(max_tokens=max_tokens, seed=request_id, ignore_eos=True)
        received = codec.pack_i32([ANSWER_ID] * (num_received // grain))
        spec = RequestSpec(params, now_ns, 0, output_ids=received, attempt=attempt)
        effects = self._core.admit(Admit(request_id, prompt, spec, now_ns), now_ns)
        assert not effects.failed, effects.failed
        self._arrived_s[request_id] = now_s

    def drop(self, request_id: int, now_s: float) -> None:
        """Drop a request after its client has disconnected."""
        self._arrived_s.pop(request_id, None)
        self._core.drop([request_id], int(now_s * 1e9))

    def restart(self) -> None:
        """Restart with an empty core."""
        self.num_cached = self.cached_tokens
        self._core = self._new_core()
        self._arrived_s.clear()
        self._result = None

    def outputs_of(self, request_id: int) -> int:
        """Return the number of tokens that the client of a live request has received."""
        assert self._core.state is not None
        return self._grain * self._core.state.live[request_id].num_outputs

    def hits_of(self, request_id: int) -> int:
        """Return the number of prompt tokens of a live request that were prefix cache hits."""
        assert self._core.state is not None
        return self._grain * self._core.state.live[request_id].stats.num_cached

    def begin_step(self, now_s: float) -> float | None:
        """Begin a step and return its end; None if the core plans no step."""
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
        duration_s = 1e-6 * self.slowness * self._coarse_step_us(num_decoding, num_new, num_keys, num_pairs)
        end_s = now_s + duration_s
        full_us = machine.step_us(
            num_decoding + MAX_BATCHED_TOKENS,
            num_keys,
            num_pairs * MAX_BATCHED_TOKENS // max(MAX_BATCHED_TOKENS, num_new),
        )
        full_s = 1e-6 * self.slowness * full_us
        self._record_first_tokens(prompts, now_s, end_s, full_s)
        self._begin_s = now_s
        self.num_steps += 1
        sampled = codec.pack_i32([ANSWER_ID] * sum(plan.samples))
        self._result = StepResult(plan.step, int(end_s * 1e9), sampled, compute_ns=int(duration_s * 1e9))
        return end_s

    def _coarse_step_us(self, num_decoding: int, num_new: int, num_keys: int, num_pairs: int) -> float:
        """Return the time of the real steps of a coarse step; prefills fill the first of them."""
        num_full, rest = divmod(num_new, MAX_BATCHED_TOKENS)
        step_us = self._machine.step_us
        total_us = (
            num_full * step_us(num_decoding + MAX_BATCHED_TOKENS, num_keys)
            + num_pairs * self._machine.pair_us
        )
        if rest:
            total_us += step_us(num_decoding + rest, num_keys)
        num_others = (self._grain if num_decoding else 0) - num_full - (rest > 0)
        return total_us + max(0, num_others) * step_us(num_decoding, num_keys)

    def _record_first_tokens(
        self, prompts: list[tuple[int, int, bool]], now_s: float, end_s: float, full_s: float
    ) -> None:
        """Compute the times of first tokens in a coarse step. Prefills run one after another, as in real steps.

        A request that arrived during the previous coarse step would have begun in a real step within it.
        """
        self._first_tokens = []
        free_s = self._free_s
        for request_id, num_tokens, is_last in prompts:
            arrived_s = self._arrived_s.get(request_id, now_s)
            earliest_s = arrived_s if self._grain > 1 and arrived_s > self._begin_s else now_s
            free_s = max(earliest_s, free_s) + full_s * max(1.0, num_tokens / MAX_BATCHED_TOKENS)
            if is_last:
                self._arrived_s.pop(request_id, None)
                self._first_tokens.append((request_id, min(free_s, end_s) if self._grain > 1 else end_s))
        self._free_s = min(free_s, end_s)

    def end_step(self, now_s: float) -> StepEvents:
        """Commit the step in flight."""
        result, self._result = self._result, None
        assert result is not None
        ended = []
        for _, tokens in self._core.commit(result, int(now_s * 1e9)).tokens:
            if any(tokens.finishes):
                ids = codec.unpack_i64(tokens.request_ids)
                ended += [ids[row] for row, finish in enumerate(tokens.finishes) if finish]
        return StepEvents(self._first_tokens, ended)
