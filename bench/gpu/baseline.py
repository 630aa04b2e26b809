"""transformers on the same machine and the same requests: static batches, and its own continuous batching.

    python -m bench.gpu.baseline [--device cpu]

The model is made of random numbers on the device. Every request draws 128 tokens: transformers has no length per request.
Static: batches of 64 prompts padded on the left to the longest. Continuous: `generate_batch`, everything asked at once. Before
both, the engine alone (`bench.gpu.alone`) on the same requests. A way of transformers that fails is a remark: it is the
baseline, not us.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from bench.arguments import command_parser
from bench.gpu.alone import measure_alone_elsewhere
from bench.gpu.figures import Figure, Report, add_report_argument
from bench.gpu.shapes import Shape, shape_for
from bench.gpu.workload import Asked, Work, requests

STATIC_BATCH = 64


def make_model(shape: Shape, device: str) -> Any:
    """Return transformers' model of the shape, made on the device."""
    config = transformers.AutoConfig.for_model(**shape.hf_config)
    models: Any = transformers.AutoModelForCausalLM
    with torch.device(device):
        return models.from_config(config, dtype=torch.bfloat16).eval()


def settings(output_len: int) -> transformers.GenerationConfig:
    """Return greedy settings without an end of sequence."""
    make: Callable[..., transformers.GenerationConfig] = transformers.GenerationConfig
    return make(
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )


def static(model: Any, asked: list[Asked]) -> int:
    """Generate in batches; return how many tokens came."""
    total = 0
    for at in range(0, len(asked), STATIC_BATCH):
        batch = asked[at : at + STATIC_BATCH]
        width = max(len(one.prompt) for one in batch)
        ids = torch.tensor(
            [[0] * (width - len(one.prompt)) + one.prompt for one in batch], device=model.device
        )
        mask = torch.tensor([[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask.to(model.device),
                generation_config=settings(batch[0].output_len),
            )
        total += (out.shape[1] - width) * len(batch)
    return total


def continuous(model: Any, asked: list[Asked]) -> int:
    """Generate with transformers' continuous batching; return how many tokens came."""
    config = settings(asked[0].output_len)
    config.min_new_tokens = None
    limits = {}  # on a GPU it sees for itself what fits
    if model.device.type == "cpu":
        limits["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=128
        )
    outputs = model.generate_batch(  # enters inference mode itself, in a thread of its own
        [one.prompt for one in asked], generation_config=config, **limits
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def rate_of(way: Callable[[Any, list[Asked]], int], model: Any, asked: list[Asked]) -> float:
    """Return tokens per second of the second run; the first, on fewer requests, warms up."""
    way(model, asked[: max(2, len(asked) // 16)])
    begun = time.perf_counter()
    total = way(model, asked)
    taken = time.perf_counter() - begun
    wanted = sum(one.output_len for one in asked)
    if total != wanted:  # continuous batching logs what went wrong, and returns what it has
        raise RuntimeError(f"{total} tokens came of {wanted} that were asked for")
    return total / taken


def measure(device: str, num: int, report: Report) -> None:
    """Measure the engine, then transformers, which keeps what memory it took."""
    alone = measure_alone_elsewhere(Work.FIXED, device, num)
    report.figure(Figure("engine alone", alone.tokens, "tokens/s"))
    shape = shape_for(device)
    asked = requests(Work.FIXED, device, num, shape.vocab_size, seed=0)
    model = make_model(shape, device)
    for name, way in (("static", static), ("continuous", continuous)):
        try:
            rate = rate_of(way, model, asked)
        except Exception as error:  # noqa: BLE001 - whatever it cannot do on this machine, the rest is measured
            report.remark(f"transformers, {name}: not measured: {type(error).__name__}: {str(error)[:200]}")
            continue
        report.figure(Figure(f"transformers, {name} batching", rate, "tokens/s"))
        report.figure(Figure(f"engine alone, of transformers, {name}", alone.tokens / rate, "x"))


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, help="how many (default: 256; on a CPU 8)")
    add_report_argument(parser)
    arguments = parser.parse_args()
    num = arguments.requests or (256 if arguments.device == "cuda" else 8)
    measure(arguments.device, num, Report(arguments.figures))


if __name__ == "__main__":
    main()
