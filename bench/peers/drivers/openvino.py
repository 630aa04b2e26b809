"""Driver of OpenVINO GenAI's continuous batching pipeline, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.drivers.closed_loop import run_closed_loop
from bench.peers.drivers.json_lines import read_arguments, serve_jobs, take_output_pipe

MAX_BATCHED_TOKENS = 2048


class PipelineStepper:
    """A `ContinuousBatchingPipeline` and the handles of its unfinished requests."""

    def __init__(self, pipeline: Any) -> None:  # the package has no type annotations
        self._pipeline = pipeline
        self._handles: dict[int, Any] = {}
        self._remaining: dict[int, int] = {}

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        """Add a request."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.min_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        config.stop_token_ids = set()
        ids = openvino.Tensor(np.asarray([prompt], dtype=np.int64))
        self._handles[request] = self._pipeline.add_request(request, ids, config)
        self._remaining[request] = output_len

    def step(self) -> Iterator[int]:
        """Run a step; return the request of each new token."""
        self._pipeline.step()
        progressed = []
        for request, handle in list(self._handles.items()):
            while handle.can_read():
                num_tokens = sum(len(output.generated_ids) for output in handle.read().values())
                progressed += [request] * num_tokens
                self._remaining[request] -= num_tokens
            if self._remaining[request] <= 0:
                del self._handles[request], self._remaining[request]
        return iter(progressed)


def main() -> None:
    """Load the model and run jobs."""
    result_pipe = take_output_pipe()
    arguments = read_arguments(__doc__)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = max(1, arguments.kv_bytes >> 30)
    scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(arguments.model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": arguments.threads}
    )
    serve_jobs(result_pipe, lambda job: run_closed_loop(job, PipelineStepper(pipeline)))


if __name__ == "__main__":
    main()
