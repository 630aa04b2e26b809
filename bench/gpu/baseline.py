"""Measure transformers on the same machine and requests: static and continuous batching.

    python -m bench.gpu.baseline [--device cpu]

The model has random weights. All requests generate 128 tokens, since transformers has no output length per request. Static:
batches of 64 prompts, padded on the left. Continuous: `generate_batch` with all requests at once. The in-process engine
(`bench.gpu.in_process`) runs the same requests before. If transformers fails, the error is a remark and the row does not fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from bench.arguments import command_parser
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.in_process import run_in_process
from bench.gpu.shapes import Shape, shape_for
from bench.gpu.workload import Work, WorkloadRequest, requests

STATIC_BATCH = 64


def make_model(shape: Shape, device: str) -> Any:
    """Return transformers' model of a shape, with random weights on the device."""
    config = transformers.AutoConfig.for_model(**shape.hf_config)
    models: Any = transformers.AutoModelForCausalLM
    with torch.device(device):
        return models.from_config(config, dtype=torch.bfloat16).eval()


def settings(output_len: int) -> transformers.GenerationConfig:
    """Return a greedy generation config without EOS."""
    make: Callable[..., transformers.GenerationConfig] = transformers.GenerationConfig
    return make(
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )


def static(model: Any, workload: list[WorkloadRequest]) -> int:
    """Generate with static batches; return the number of output tokens."""
    total = 0
    for begin in range(0, len(workload), STATIC_BATCH):
        batch = workload[begin : begin + STATIC_BATCH]
        width = max(len(request.prompt) for request in batch)
        ids = torch.tensor(
            [[0] * (width - len(request.prompt)) + request.prompt for request in batch], device=model.device
        )
        mask = torch.tensor(
            [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in batch]
        )
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask.to(model.device),
                generation_config=settings(batch[0].output_len),
            )
        total += (out.shape[1] - width) * len(batch)
    return total


def continuous(model: Any, workload: list[WorkloadRequest]) -> int:
    """Generate with transformers' continuous batching; return the number of output tokens."""
    config = settings(workload[0].output_len)
    config.min_new_tokens = None
    limits = {}  # on a GPU transformers chooses its limits
    if model.device.type == "cpu":
        limits["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=128
        )
    outputs = model.generate_batch(  # it enters inference mode in its own thread
        [request.prompt for request in workload], generation_config=config, **limits
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def rate_of(
    generate: Callable[[Any, list[WorkloadRequest]], int], model: Any, workload: list[WorkloadRequest]
) -> float:
    """Return tokens per second, after a warm-up with fewer requests."""
    generate(model, workload[: max(2, len(workload) // 16)])
    begin_s = time.perf_counter()
    total = generate(model, workload)
    elapsed_s = time.perf_counter() - begin_s
    wanted = sum(request.output_len for request in workload)
    if total != wanted:  # continuous batching logs its errors, and returns incomplete outputs
        raise RuntimeError(f"transformers generated {total} of {wanted} tokens")
    return total / elapsed_s


def measure(device: str, num: int, report: Report) -> None:
    """Measure the in-process engine, then transformers, which does not free its memory."""
    ours = run_in_process(Work.FIXED, device, num)
    report.figure(Figure("in-process engine", ours.tokens, "tokens/s"))
    shape = shape_for(device)
    workload = requests(Work.FIXED, device, num, shape.vocab_size, seed=0)
    model = make_model(shape, device)
    for name, generate in (("static", static), ("continuous", continuous)):
        try:
            rate = rate_of(generate, model, workload)
        except Exception as error:  # noqa: BLE001 - a failure of transformers does not end the row
            report.remark(f"transformers, {name}: not measured: {type(error).__name__}: {str(error)[:200]}")
            continue
        report.figure(Figure(f"transformers, {name} batching", rate, "tokens/s"))
        report.figure(Figure(f"in-process engine / transformers, {name}", ours.tokens / rate, "x"))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, help="number of requests (default: 256; on a CPU 8)")
    add_report_argument(parser)
    arguments = parser.parse_args()
    num = arguments.requests or (256 if arguments.device == "cuda" else 8)
    measure(arguments.device, num, Report(arguments.figures))


if __name__ == "__main__":
    main()
