"""Decoding with a small model of each kind, against what the machine's memory allows.

Random weights of a published shape (or a smaller one of its kind), in this process alone. For each number of requests it prints
tokens per second and the share of the limit: the time that reading what the step reads (weights once, and for experts those that
were chosen, and the requests' keys and values) takes at the rate measured right before and behind it.

    python -m bench.families                                 # all kinds
    python -m bench.families --kinds llama mixtral --rows 1 8

A kind that Quintet has no layers for is computed by transformers, and its row says so.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.kernels.limits import Limits
from bench.step import BLOCK_SIZE, Steps
from quintet.deploy.resolve.build import resolve
from quintet.deploy.resolve.flags import Options
from quintet.executor.ops.host_library import open_library
from quintet.executor.program.runner import ProgramRunner
from quintet.executor.worker import Worker, make_torch_worker
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError

_SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "windows": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256},
    "head norms": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "norms behind": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "learned positions": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": 16,
        "n_head": 16,
        "n_positions": 2048,
        "num_key_value_heads": None,
    },
    "ALiBi": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "n_layer": 16,
        "n_head": 16,
        "num_key_value_heads": None,
    },
    "parallel": {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"},
    "soft caps": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 256,
    },
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "latent": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 704,
        "first_k_dense_replace": 1,
    },
    "state": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 32,
        "head_dim": 64,
        "state_size": 64,
        "n_groups": 1,
    },
    "by transformers": {"architectures": ["ApertusForCausalLM"], "model_type": "apertus"},
}
"""What is not said is as in `_SMALL`."""


def open_kind(folder: Path, kind: str, args: argparse.Namespace) -> tuple[EngineConfig, Worker]:
    """Write the kind's card and load it as `quintet serve --load-format dummy` would."""
    card = _SMALL | {"dtype": args.dtype, "tie_word_embeddings": False} | KINDS[kind]
    (folder / "config.json").write_text(json.dumps(card))
    (folder / "tokenizer.json").write_text("{}")
    options = Options(
        model=str(folder),
        dtype=args.dtype,
        device="cpu",
        load_format="dummy",
        block_size=BLOCK_SIZE,
        max_model_len=args.context + args.repetitions + BLOCK_SIZE,
        max_num_seqs=max(args.rows),
        threads=args.threads,
        kv_cache_memory="1GiB",
        model_impl=args.model_impl,
        quantization=args.quantization,
    )
    config = resolve(options, folder / "run", http=False).config
    config = msgspec.structs.replace(config, executor=msgspec.structs.replace(config.executor, seed=1))
    return config, make_torch_worker(config)


def step_bytes(worker: Worker, num_rows: int, context: int) -> int | None:
    """Return the bytes of weights and KV that a decode step reads; None where no program says so."""
    if not isinstance(worker.runner, ProgramRunner):
        return None
    parts = worker.runner.balance([context] * num_rows, [1] * num_rows, 1)
    return sum(part.bytes for part in parts)


def measure(
    config: EngineConfig, worker: Worker, num_rows: int, args: argparse.Namespace, limits: Limits
) -> str:
    """Return one row of the table."""
    worker.reset()
    model = config.model
    steps = Steps(num_rows, args.context, 1, model.vocab_size, model.max_model_len, len(model.kv.groups))
    worker.execute(steps.next(advance=False))
    before = statistics.median(limits.read_gb_s() for _ in range(5))
    seconds = []
    for _ in range(args.repetitions):
        begun = time.perf_counter()
        worker.execute(steps.next())
        seconds.append(time.perf_counter() - begun)
    rate = max(before, statistics.median(limits.read_gb_s() for _ in range(5)))
    step, num_bytes = statistics.median(seconds), step_bytes(worker, num_rows, args.context)
    if num_bytes is None:
        return f"{num_rows:4d} {step * 1e3:9.2f} ms {num_rows / step:9.1f} tokens/s        –"
    share = num_bytes / 1e9 / rate / step
    return (
        f"{num_rows:4d} {step * 1e3:9.2f} ms {num_rows / step:9.1f} tokens/s {share:8.0%} of {rate:.1f} GB/s"
    )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), metavar="KIND")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="requests in a step")
    parser.add_argument("--context", type=int, default=256, help="tokens each has before")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4", "w8a8"), default="none")
    parser.add_argument("--model-impl", choices=("auto", "quintet", "transformers"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: as the server chooses")
    parser.add_argument("--repetitions", type=int, default=20)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    library = open_library()
    assert library is not None, "the compiled kernels are not built"
    torch.set_grad_enabled(False)
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                config, worker = open_kind(Path(folder), kind, args)
            except ConfigError as error:
                print(f"{kind:18s} {str(error).removeprefix(folder)}", flush=True)
                continue
            limits = Limits(library)
            for num_rows in args.rows:
                line = measure(config, worker, num_rows, args, limits)
                print(f"{kind:18s} {config.model.implementation:13s} {line}", flush=True)


if __name__ == "__main__":
    main()
