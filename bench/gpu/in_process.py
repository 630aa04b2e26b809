"""Measure the throughput of core and worker in one process: without HTTP, tokenization and sockets.

    python -m bench.gpu.in_process --work conversation --requests 1000 [--device cpu]

`bench.gpu.serving` and `bench.gpu.baseline` compare with this throughput. They run this command in a separate process, which
frees the device's memory when it ends. The last line of output is JSON.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.arguments import command_parser
from bench.gpu.engine import InProcessEngine, run_idle_tasks
from bench.gpu.machine import environment
from bench.gpu.shapes import engine_config, shape_for
from bench.gpu.workload import Work, requests
from quintet.executor.backends.registry import make_worker
from quintet.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the in-process engine and of the server."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens and finished requests per second."""

    tokens: float
    requests: float


def limits_for(device: str) -> Limits:
    """Return the limits for a device."""
    return Limits(256, 4096, 4096) if device == "cuda" else Limits(8, 128, 64)


def measure_in_process(work: Work, device: str, num: int) -> Rates:
    """Admit all requests at once, run them to their ends, and return the throughput."""
    shape, limits = shape_for(device), limits_for(device)
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(
            shape,
            Path(folder),
            device,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        worker = make_worker(config)
    run_idle_tasks(worker)
    elapsed_s, tokens = 0.0, 0
    for seed, count in ((1, max(4, num // 8)), (0, num)):  # the first is a warm-up
        engine = InProcessEngine(config, worker)
        workload = requests(work, device, count, shape.vocab_size, seed)
        begin_s = time.perf_counter()
        for number, request in enumerate(workload, 1):
            params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
            engine.admit(number, request.prompt, params)
        engine.run()
        elapsed_s = time.perf_counter() - begin_s
        counts = [len(engine.outputs[number]) for number in range(1, count + 1)]
        assert counts == [request.output_len for request in workload], "a request ended before its length"
        tokens = sum(counts)
    return Rates(tokens / elapsed_s, num / elapsed_s)


def run_in_process(work: Work, device: str, num: int) -> Rates:
    """Run `measure_in_process` in a separate process; return its result."""
    command = [
        sys.executable,
        "-m",
        "bench.gpu.in_process",
        "--work",
        work,
        "--device",
        device,
        "--requests",
        str(num),
    ]
    ran = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), text=True, check=True)
    return Rates(**json.loads(ran.stdout.splitlines()[-1]))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--work", choices=list(Work), type=Work, default=Work.CONVERSATION)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # kernels and libraries chosen at boot
    rates = measure_in_process(arguments.work, arguments.device, arguments.requests)
    print(json.dumps({"tokens": rates.tokens, "requests": rates.requests}))


if __name__ == "__main__":
    main()
