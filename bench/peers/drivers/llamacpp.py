"""Driver of llama.cpp by its batch API, with the schedule of `llama-server`: one token of each running sequence, then prompts.

llama-cpp-python's server runs one sequence at a time, so this driver batches sequences itself. As in `llama-server`, a call has
up to 2 048 tokens, computed 512 at a time, and each sequence has a contiguous part of the KV memory.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from bench.peers.drivers.closed_loop import run_closed_loop
from bench.peers.drivers.json_lines import read_arguments, serve_jobs, take_output_pipe
from bench.peers.jobs import Job, JobResult

MAX_BATCH, MAX_MICRO_BATCH = 2048, 512
CONTEXT_STEP = 256


@dataclass(slots=True)
class Running:
    """A running request and its row of the KV memory."""

    request: int
    row: int
    prompt: Sequence[int]
    output_len: int
    computed: int = 0
    generated: int = 0
    last_token: int = 0


class ContextStepper:
    """A llama.cpp context of ``num_rows`` sequences of ``row_len`` tokens each."""

    def __init__(self, model: Any, num_rows: int, row_len: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_rows * row_len
        params.n_seq_max = num_rows
        params.n_batch, params.n_ubatch = MAX_BATCH, MAX_MICRO_BATCH
        params.n_outputs_max = max(num_rows, 1)
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        params.no_perf = True
        self.shape = (num_rows, row_len)
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp could not allocate a context of {num_rows} x {row_len} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._free_rows = deque(range(num_rows))
        self._waiting: deque[tuple[int, Sequence[int], int]] = deque()
        self._running: list[Running] = []

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        """Queue a request; it starts when a row is free."""
        self._waiting.append((request, prompt, output_len))

    def step(self) -> list[int]:
        """Run one batch; return the request of each new token."""
        while self._waiting and self._free_rows:
            request, prompt, output_len = self._waiting.popleft()
            self._running.append(Running(request, self._free_rows.popleft(), prompt, output_len))
        num_tokens = 0
        sampled: list[tuple[Running, int]] = []
        for sequence in self._running:
            if sequence.generated:
                self._add_token(num_tokens, sequence.last_token, sequence.computed, sequence.row, True)
                sequence.computed += 1
                sampled.append((sequence, num_tokens))
                num_tokens += 1
        for sequence in self._running:
            if sequence.generated or num_tokens == MAX_BATCH:
                continue
            until = min(len(sequence.prompt), sequence.computed + MAX_BATCH - num_tokens)
            for position in range(sequence.computed, until):
                is_last = position == len(sequence.prompt) - 1
                self._add_token(num_tokens, sequence.prompt[position], position, sequence.row, is_last)
                if is_last:
                    sampled.append((sequence, num_tokens))
                num_tokens += 1
            sequence.computed = until
        self._batch.n_tokens = num_tokens
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {num_tokens} tokens returned {status}")
        for sequence, index in sampled:
            self._sample(sequence, index)
        return [sequence.request for sequence, _ in sampled]

    def close(self) -> None:
        """Free the context."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def _add_token(self, index: int, token: int, position: int, row: int, needs_logits: bool) -> None:
        batch = self._batch
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = row
        batch.logits[index] = needs_logits

    def _sample(self, sequence: Running, index: int) -> None:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        sequence.last_token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        sequence.generated += 1
        if sequence.generated == sequence.output_len:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence.row, -1, -1)
            self._running.remove(sequence)
            self._free_rows.append(sequence.row)


class Driver:
    """The loaded model, and a context that is reused by jobs of the same shape."""

    def __init__(self, model: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(
            str(model).encode(), llama_cpp.llama_model_default_params()
        )
        if not loaded:
            raise FileNotFoundError(f"llama.cpp cannot load {model}")
        self._model, self._threads = loaded, threads
        self._stepper: ContextStepper | None = None

    def run(self, job: Job) -> JobResult:
        """Run a job."""
        row_len = -(-job.context_len // CONTEXT_STEP) * CONTEXT_STEP
        if self._stepper is None or self._stepper.shape != (job.clients, row_len):
            if self._stepper is not None:
                self._stepper.close()
            self._stepper = ContextStepper(self._model, job.clients, row_len, self._threads)
        return run_closed_loop(job, self._stepper)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _discard_log(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    """Discard a log line of llama.cpp."""


def main() -> None:
    """Load the model and run jobs."""
    output = take_output_pipe()
    arguments = read_arguments(__doc__)
    llama_cpp.llama_log_set(_discard_log, ctypes.c_void_p(0))
    serve_jobs(output, Driver(arguments.model, arguments.threads).run)


if __name__ == "__main__":
    main()
