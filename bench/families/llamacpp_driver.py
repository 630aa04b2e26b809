"""Driver of llama.cpp: decode steps of a model with random weights. Runs in llama.cpp's environment.

Prints ``ready`` after the load, or the reason why llama.cpp does not load the model. For each line of stdin, ``rows context
steps``, it runs that many decode steps and prints a JSON list of their times in seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from bench.families import gguf_files
from bench.peers.drivers.json_lines import READY, take_output_pipe
from bench.peers.gguf_files import QUANTIZED, quantize

MAX_BATCH_TOKENS = 2048


class Context:
    """A llama.cpp context with ``num_rows`` sequences of ``context`` tokens, and space for ``steps`` further tokens of each."""

    def __init__(self, model: Any, num_rows: int, context: int, steps: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        row_len = -(-(context + steps) // 256) * 256
        params.n_ctx, params.n_seq_max = num_rows * row_len, num_rows
        params.n_batch, params.n_ubatch = MAX_BATCH_TOKENS, 512
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified, params.no_perf = False, True
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp could not allocate a context of {num_rows} x {row_len} tokens")
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._num_rows, self._length = num_rows, 0
        for row in range(num_rows):
            for begin in range(0, context, MAX_BATCH_TOKENS):
                self._decode(
                    [(row, at, False) for at in range(begin, min(context, begin + MAX_BATCH_TOKENS))]
                )
        self._length = context
        self.step()

    def step(self) -> float:
        """Run a decode step of all sequences, with greedy sampling; return its time in seconds."""
        begin_s = time.perf_counter()
        self._decode([(row, self._length, True) for row in range(self._num_rows)])
        for row in range(self._num_rows):
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        self._length += 1
        return time.perf_counter() - begin_s

    def close(self) -> None:
        """Free the context."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def _decode(self, tokens: list[tuple[int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (row, position, needs_logits) in enumerate(tokens):
            batch.token[index] = (row * 7919 + position * 104_729) % self._vocab_size
            batch.pos[index], batch.n_seq_id[index], batch.seq_id[index][0] = position, 1, row
            batch.logits[index] = needs_logits
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens returned {status}")


def make_file(folder: Path, quantization: str) -> Path:
    """Write a GGUF file for the folder's config and return its path. Raises KeyError for an unsupported model type."""
    plain = folder / "bf16.gguf"
    gguf_files.write(json.loads((folder / "config.json").read_text()), plain)
    if quantization == "none":
        return plain
    target = folder / f"{quantization}.gguf"
    quantize(plain, target, QUANTIZED[quantization])
    plain.unlink()
    return target


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _to_stderr(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    if level >= 3:  # errors and warnings
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    """Load the model, then run steps until stdin ends."""
    descriptor = take_output_pipe()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantization", choices=("none", *QUANTIZED), default="none")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="maximum number of steps of a context")
    arguments = parser.parse_args()
    llama_cpp.llama_log_set(_to_stderr, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with open(descriptor, "w", buffering=1) as out:
        try:
            file = make_file(arguments.folder, arguments.quantization)
        except KeyError as unknown:
            print(f"no GGUF architecture for model type {unknown}", file=out)
            return
        model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        file.unlink()
        print(READY if model else "llama.cpp did not load the model", file=out)
        if not model:
            return
        shape, context = (0, 0), None
        for line in sys.stdin:
            num_rows, length, steps = map(int, line.split())
            if context is None or shape != (num_rows, length):
                if context is not None:
                    context.close()
                context = Context(model, num_rows, length, arguments.steps, arguments.threads)
                shape = num_rows, length
            print(json.dumps([context.step() for _ in range(steps)]), file=out)


if __name__ == "__main__":
    main()
