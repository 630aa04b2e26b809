"""The engine alone: how fast core and worker finish requests without HTTP, text and sockets.

    python -m bench.gpu.alone --work conversation --requests 1000 [--device cpu]

What `bench.gpu.serving` and `bench.gpu.baseline` compare with; they run it as a process of its own, which gives the device's
memory back as it ends. Prints one line of JSON at the end.
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
from bench.gpu.engine import EngineAlone, finish_chores
from bench.gpu.machine import environment
from bench.gpu.shapes import engine_config, shape_for
from bench.gpu.workload import Work, requests
from quintet.executor.backends.registry import make_worker
from quintet.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings that the engine alone and the server share."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Throughput of the engine alone, per second."""

    tokens: float
    requests: float


def limits_for(device: str) -> Limits:
    """Return the limits of a device."""
    return Limits(256, 4096, 4096) if device == "cuda" else Limits(8, 128, 64)


def measure_alone(work: Work, device: str, num: int) -> Rates:
    """Have everything asked at once, and return how fast it was done."""
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
    finish_chores(worker)
    taken, tokens = 0.0, 0
    for seed, count in ((1, max(4, num // 8)), (0, num)):  # the first warms up
        engine = EngineAlone(config, worker)
        asked = requests(work, device, count, shape.vocab_size, seed)
        begun = time.perf_counter()
        for number, one in enumerate(asked, 1):
            params = SamplingParams(temperature=0.0, max_tokens=one.output_len, ignore_eos=True)
            engine.admit(number, one.prompt, params)
        engine.run()
        taken = time.perf_counter() - begun
        counts = [len(engine.outputs[number]) for number in range(1, count + 1)]
        assert counts == [one.output_len for one in asked], "a request ended before its length"
        tokens = sum(counts)
    return Rates(tokens / taken, num / taken)


def measure_alone_elsewhere(work: Work, device: str, num: int) -> Rates:
    """Return `measure_alone` of a process of its own."""
    command = [
        sys.executable,
        "-m",
        "bench.gpu.alone",
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
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what was chosen at boot, and why
    rates = measure_alone(arguments.work, arguments.device, arguments.requests)
    print(json.dumps({"tokens": rates.tokens, "requests": rates.requests}))


if __name__ == "__main__":
    main()
