"""Measure the time of each operation of an executor's step, in this process.

The model has a well-known shape and random weights, or is a checkpoint. For each batch, prints the median step time, the time
outside the recorded program (Python: tables, arrays, sampling), and the time of each of the program's operations.

    python -m bench.step --shape S --rows 1 8 32 --context 256
    python -m bench.step --shape S --new 2048 --rows 1 --context 0      # one prompt of 2,048 tokens
    python -m bench.step --model FILE.gguf --rows 1                     # with a checkpoint's weights and formats
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from bench.arguments import command_parser
from bench.kernels.op_balance import profile
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.platforms.shares import take_share
from quintet.executor.backends.registry import make_worker
from quintet.executor.distributed.parallel.follower_processes import FollowerProcesses
from quintet.executor.model_config.fitting import leaves_of
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.share import Share
from quintet.executor.model_config.spec import DecoderSpec
from quintet.executor.slots import Rows
from quintet.executor.worker import Worker
from quintet.process.spans import no_span
from quintet.wire.codec import pack_i32, pack_u8
from quintet.wire.config import (
    ActivationDtype,
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    LogitsDtype,
    ModelConfig,
    ProcessesConfig,
    Quantization,
    SchedulerConfig,
)
from quintet.wire.ids import Role, WorkerId
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan

BLOCK_SIZE = 16

SHAPES: dict[str, dict[str, Any]] = {
    "S": {  # Qwen2.5-0.5B
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "M": {  # Llama-3.2-1B
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "E": {  # two of the layers of OLMoE-1B-7B
        "architectures": ["OlmoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Capacity and number formats of the measured configuration."""

    rows: Sequence[int]
    """Requests in a step."""
    context: int
    """Tokens of each request in the KV cache before the first step."""
    new: int
    """Tokens of each request in a step."""
    repetitions: int = 20
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantization: Quantization = "none"
    activation_dtype: ActivationDtype = "auto"
    logits_dtype: LogitsDtype = "float32"
    threads: int = 1
    pin: bool = False


def config_of(
    folder: Path,
    hf_config: dict[str, Any],
    setup: Setup,
    ranks: int = 1,
    *,
    whole_experts: bool = False,
    leaves: int = 1,
    decode_context: int = 1,
) -> EngineConfig:
    """Return the engine configuration of an HF config with the capacity of ``setup``; ``folder`` is the run folder.

    leaves: summation leaves of layout-invariant sums. decode_context: decode context parallel size.
    """
    heads = hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or hf_config["hidden_size"] // heads
    kv = full_layers(
        hf_config["num_hidden_layers"],
        Share(0, ranks).of_kv_heads(hf_config["num_key_value_heads"]).count,
        head_dim,
        4 if setup.dtype == "float32" else 2,
        BLOCK_SIZE,
    )
    length = setup.context + setup.new + setup.repetitions + 8
    blocks = -(-length // BLOCK_SIZE) * max(setup.rows) + 1
    return EngineConfig(
        run_dir=str(folder),
        model=ModelConfig(
            path=str(folder),
            tokenizer_path=str(folder),
            served_names=["bench"],
            architecture=hf_config["architectures"][0],
            hf_config=json.dumps(hf_config),
            dtype=setup.dtype,
            vocab_size=hf_config["vocab_size"],
            max_model_len=length,
            eos_token_ids=[],
            kv=kv,
        ),
        cache=CacheConfig(memory_bytes=blocks * kv.bytes_per_block),
        scheduler=SchedulerConfig(
            max_num_seqs=max(setup.rows), max_num_batched_tokens=max(2048, setup.new * max(setup.rows))
        ),
        executor=ExecutorConfig(
            load_format="dummy",
            threads=setup.threads,
            quantization=setup.quantization,
            activation_dtype=setup.activation_dtype,
            logits_dtype=setup.logits_dtype,
            pin_threads=setup.pin,
            tensor_parallel_size=ranks,
            decode_context_parallel_size=decode_context,
            expert_parallel=whole_experts,
            sum_leaves=leaves,
        ),
        frontend=FrontendConfig(),
        processes=ProcessesConfig(),
    )


def config_of_model(model: str, folder: Path, setup: Setup) -> EngineConfig:
    """Return the engine configuration of a checkpoint with the capacity of ``setup``; ``folder`` is the run folder."""
    length = setup.context + setup.new + setup.repetitions + 8
    options = Options(
        model=model,
        device="cpu",
        dtype=setup.dtype,
        block_size=BLOCK_SIZE,
        max_model_len=length,
        max_num_seqs=max(setup.rows),
        max_num_batched_tokens=max(2048, setup.new * max(setup.rows)),
        activation_dtype=setup.activation_dtype,
        logits_dtype=setup.logits_dtype,
        threads=setup.threads,
        pin_threads=setup.pin,
    )
    config = resolve(options, folder / "run", http=False).config
    blocks = -(-length // BLOCK_SIZE) * max(setup.rows) + 1
    cache = msgspec.structs.replace(config.cache, memory_bytes=blocks * config.model.kv.bytes_per_block)
    return msgspec.structs.replace(config, cache=cache)


def _leaves_of(hf_config: dict[str, Any]) -> int:
    spec = FAMILIES[hf_config["architectures"][0]].read(HfConfig(hf_config, "the shape"))
    assert isinstance(spec, DecoderSpec), spec
    return leaves_of(spec)


class Steps:
    """Plans for ``num_rows`` requests that each have ``context`` random tokens and compute ``new`` more per step."""

    def __init__(
        self,
        num_rows: int,
        context: int,
        new: int,
        vocab_size: int,
        max_model_len: int,
        num_groups: int = 1,
        first: int = 0,
    ) -> None:
        """first: slot of the first row."""
        self._slots = range(first, first + num_rows)
        self._rows, self._new, self._length = num_rows, new, context
        self._step = 0
        tokens = np.random.default_rng(0).integers(0, vocab_size, (num_rows, max_model_len), dtype=np.int32)
        blocks_each = -(-max_model_len // BLOCK_SIZE)
        self._new_rows = [
            NewRow(
                slot=first + row,
                generation=1,
                request_id=first + row,
                token_ids=tokens[row].tobytes(),
                num_prompt_tokens=max_model_len,
                params=SamplingParams(temperature=0.0),
                seed=row,
            )
            for row in range(num_rows)
        ]
        entries = np.array(
            [
                (row, group, column, (row * num_groups + group) * blocks_each + column)
                for row in self._slots
                for group in range(num_groups)
                for column in range(blocks_each)
            ],
            np.int32,
        )
        self._blocks = entries.tobytes()

    def next(self, advance: bool = True) -> StepPlan:
        """Return the next plan. With ``advance`` false, the plan after it computes the same positions again."""
        plan = StepPlan(
            step=self._step,
            sent_ns=0,
            freed=b"",
            copies=b"",
            slots=pack_i32(list(self._slots)),
            starts=pack_i32([self._length] * self._rows),
            counts=pack_i32([self._new] * self._rows),
            samples=pack_u8([1] * self._rows),
            blocks=self._blocks if self._step == 0 else b"",
            new_rows=self._new_rows if self._step == 0 else [],
        )
        self._step += 1
        if advance:
            self._length += self._new
        return plan


@contextmanager
def loaded(config: EngineConfig) -> Iterator[tuple[Worker, EngineConfig]]:
    """Load a worker, and start the processes of the other ranks."""
    if config.executor.tensor_parallel_size == 1:
        worker = make_worker(config)
        assert isinstance(worker, Worker)
        yield worker, config
        return
    with closing(FollowerProcesses(WorkerId(Role.EXECUTOR, 0, 1), config)) as followers:
        config = take_share(0, config)
        worker = make_worker(config, no_span, followers.memory)
        assert isinstance(worker, Worker), "pipeline stages are not supported here"
        yield worker, config


def write_kv(worker: Worker) -> None:
    """Write every block of KV memory, in all ranks. Pages never written all map to one cached page of zeros."""
    blocks = torch.arange(worker.num_blocks, dtype=torch.int32)
    worker.copy_blocks(torch.stack((blocks, blocks), 1).numpy().tobytes())


def measure(worker: Worker, num_rows: int, args: argparse.Namespace, vocab_size: int, length: int) -> None:
    """Measure one batch and print its times."""
    worker.reset()
    steps = Steps(num_rows, args.context, args.new, vocab_size, length)
    worker.execute(steps.next(advance=False))
    seconds, program = [], []
    runner = worker.runner
    assert isinstance(runner, ProgramRunner), "the compiled kernels are not built"
    for _ in range(args.repetitions):
        program_s = runner.program.seconds
        begin_s = time.perf_counter()
        worker.execute(steps.next(advance=args.new == 1))
        seconds.append(time.perf_counter() - begin_s)
        program.append(runner.program.seconds - program_s)
    step, program_s = statistics.median(seconds), statistics.median(program)
    tokens = num_rows * args.new
    print(
        f"rows {num_rows:4d} x {args.new} new, context {args.context}: {step * 1e3:9.2f} ms per step,"
        f" {tokens / step:9.1f} tokens/s, outside the program {(step - program_s) * 1e6:6.0f} µs ({1 - program_s / step:.1%})"
    )
    if args.brief:
        return
    plan = steps.next(advance=False)
    rows = Rows(plan)
    last = rows.offsets + rows.counts - 1
    totals: dict[str, list[float]] = defaultdict(list)
    for name, spent in profile(runner, rows, worker.tables, last):
        totals[name].append(spent)
    whole = sum(sum(values) for values in totals.values())
    for name, values in sorted(totals.items(), key=lambda item: -sum(item[1])):
        spent = sum(values)
        each = f"{len(values):3d} times {statistics.median(values) * 1e6:9.0f} µs"
        print(f"    {name:28s} {spent * 1e3:9.2f} ms {spent / whole:6.1%}   {each}")


def main() -> None:
    """Parse the command line and measure."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--shape", choices=SHAPES, default="S", help="S: Qwen2.5-0.5B, M: Llama-3.2-1B, E: layers of OLMoE"
    )
    parser.add_argument("--model", help="folder or file of a checkpoint, instead of a shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="requests in a step")
    parser.add_argument(
        "--context", type=int, default=256, help="tokens of each request in the KV cache (default: 256)"
    )
    parser.add_argument("--new", type=int, default=1, help="tokens of each request in a step (default: 1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4", "w8a8"), default="none")
    parser.add_argument(
        "--activation-dtype", choices=("auto", "int8"), default="auto", help="as of `quintet serve`"
    )
    parser.add_argument("--logits-dtype", choices=("float32", "model"), default="float32")
    parser.add_argument("--threads", type=int, default=0, help="0: the server's default")
    parser.add_argument("--pin", action="store_true", help="pin each thread to one core")
    parser.add_argument(
        "--ranks", type=int, default=1, help="as --tensor-parallel-size; --threads is per rank"
    )
    parser.add_argument("--kv-heads", type=int, metavar="N", help="number of KV heads (default: the shape's)")
    parser.add_argument("--kv-together", type=int, default=1, help="as --decode-context-parallel-size")
    parser.add_argument("--whole-experts", action="store_true", help="as --enable-expert-parallel")
    parser.add_argument(
        "--layout-invariant", action="store_true", help="results with the same bits for any number of ranks"
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--brief", action="store_true", help="do not list operations")
    args = parser.parse_args()
    hf_config = SHAPES[args.shape] | ({} if args.kv_heads is None else {"num_key_value_heads": args.kv_heads})
    setup = Setup(**{each.name: getattr(args, each.name) for each in fields(Setup)})
    with tempfile.TemporaryDirectory() as folder:
        begin_s = time.perf_counter()
        if args.model is not None:
            config = config_of_model(args.model, Path(folder), setup)
        else:
            config = config_of(
                *(Path(folder), hf_config, setup, args.ranks),
                whole_experts=args.whole_experts,
                leaves=_leaves_of(hf_config) if args.layout_invariant else 1,
                decode_context=args.kv_together,
            )
        with loaded(config) as (worker, config):
            print(worker.facts["worker"], f"loaded in {time.perf_counter() - begin_s:.1f} s", sep=", ")
            while worker.has_idle_tasks:  # a server runs these in its first idle seconds
                worker.run_idle_task()
            write_kv(worker)
            for num_rows in args.rows:
                measure(worker, num_rows, args, config.model.vocab_size, config.model.max_model_len)


if __name__ == "__main__":
    main()
