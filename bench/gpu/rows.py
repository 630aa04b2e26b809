"""The rows of the GPU checklist: what each shows, the command that runs it, what it needs, how long it may take.

Knows no outcome and starts nothing.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

PYTEST = (
    *("-m", "pytest", "--whole", "-p", "no:cacheprovider"),
    *("-o", "addopts=-q --strict-markers --import-mode=importlib"),
    *("-o", "filterwarnings=default"),  # a warning of another version of torch is no failure of a GPU's
)

DEVICE = ("torch", "numpy", "cupy")
ENGINE = (*DEVICE, "msgspec", "tqdm", "safetensors")
TESTS = (*ENGINE, "pytest", "transformers", "llguidance", "gguf")
"""Tests make small models with transformers and gguf; the engine of tests compiles grammars with llguidance."""
PROCESSES = (
    *ENGINE,
    "zmq",
    "psutil",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "jinja2",
    "tokenizers",
    "prometheus_client",
    "setproctitle",
    "yaml",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Its command follows the interpreter, and takes ``--figures FILE`` and ``--device cuda|cpu``."""

    name: str
    shows: str
    target: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    """Modules without which it is skipped."""
    takes_s: int
    """About how long on one H200: what the budget counts with before the row has run anywhere."""
    limit_s: int
    """After so long it hangs, and is killed."""
    gpus: int = 1
    """Least number of devices; with fewer the row is skipped."""

    @property
    def words(self) -> str:
        """The command as a person would type it."""
        if self.command[: len(PYTEST)] == PYTEST:
            return shlex.join(("pytest", *self.command[len(PYTEST) :]))
        return shlex.join(("python", *self.command))


ROWS = (
    Row(
        "load",
        "kernels are compiled for this device, and load as machine code, as PTX and from their source",
        "all load",
        ("-m", "bench.gpu.load"),
        ENGINE,
        takes_s=30,
        limit_s=400,
    ),
    Row(
        "kernels",
        "every kernel equals its torch reference, on shapes that straddle tiles, in every number format",
        "all pass",
        (
            *PYTEST,
            "tests/gpu/test_kernels.py",
            "tests/gpu/test_ops.py",
            "-k",
            "not other_kinds and not hybrid and not coded",
        ),
        TESTS,
        takes_s=80,
        limit_s=420,
    ),
    Row(
        "codes",
        "weights in the codes of quantized checkpoints: products equal their torch reference, layers have the checkpoint's"
        " numbers; models say what the model of their numbers says, with the same bits in chunks and in company",
        "all pass",
        (*PYTEST, "tests/gpu/test_kernels.py", "-k", "coded"),
        TESTS,
        takes_s=20,
        limit_s=300,
    ),
    Row(
        "kinds",
        "one model of each kind of layer (ALiBi, parallel residual, caps, two rotations, experts, latents, states): tokens are"
        " transformers', fp32; bits with --batch-invariant are the same in chunks and in company, bf16",
        "all equal",
        (*PYTEST, "tests/gpu/test_kernels.py", "-k", "other_kinds or hybrid"),
        TESTS,
        takes_s=45,
        limit_s=300,
    ),
    Row(
        "models-fp32",
        "greedy tokens equal transformers', fp32, ten small models",
        "all equal",
        (*PYTEST, "tests/gpu/test_models.py", "-k", "fp32"),
        TESTS,
        takes_s=45,
        limit_s=180,
    ),
    Row(
        "models-bf16",
        "greedy tokens match transformers', bf16, 64 prompts of 128 tokens, four families; mean KL",
        "≥ 95 %",
        (*PYTEST, "tests/gpu/test_models.py", "-k", "bf16"),
        TESTS,
        takes_s=50,
        limit_s=240,
    ),
    Row(
        "steps",
        "captured graphs = eager, overlap on = off, swapping = recomputing = neither: the same tokens; graphs are captured again"
        " after others were dropped",
        "all equal",
        (*PYTEST, "tests/gpu/test_steps.py", "tests/gpu/test_graphs.py"),
        TESTS,
        takes_s=40,
        limit_s=180,
    ),
    Row(
        "invariance",
        "--batch-invariant: a request alone = among 63 others = in chunks = preempted, bit for bit",
        "all equal",
        (*PYTEST, "tests/gpu/test_invariance.py"),
        TESTS,
        takes_s=40,
        limit_s=180,
    ),
    Row(
        "memory",
        "out of memory in a step: a smaller step, the same tokens, no death",
        "all pass",
        (*PYTEST, "tests/gpu/test_memory.py"),
        TESTS,
        takes_s=20,
        limit_s=120,
    ),
    Row(
        "processes",
        "the five processes end to end with --device cuda",
        "as on the CPU",
        (*PYTEST, "tests/gpu/test_serve.py"),
        (*PROCESSES, "pytest"),
        takes_s=40,
        limit_s=180,
    ),
    Row(
        "kill",
        "executor killed under load: the streams resume, no byte changes, its memory is free again",
        "all pass",
        (*PYTEST, "tests/gpu/test_kill.py"),
        (*PROCESSES, "pytest"),
        takes_s=45,
        limit_s=300,
    ),
    Row(
        "ranks",
        "a model divided over two GPUs: answers in fp32 are those of one, with graphs, without, and with --batch-invariant; a"
        " rank killed under load: no byte changes",
        "all equal",
        (*PYTEST, "tests/gpu/test_ranks.py"),
        (*PROCESSES, "pytest"),
        takes_s=50,
        limit_s=400,
        gpus=2,
    ),
    Row(
        "ceilings",
        "what the device can do: copying and reading its memory, multiplying bf16 matrices, copies to and from the host",
        "–",
        ("-m", "bench.gpu.ceilings"),
        DEVICE[:2],
        takes_s=15,
        limit_s=90,
    ),
    Row(
        "kernel-rates",
        "each kernel's bandwidth or multiply rate",
        "decode attention ≥ 80 % of bandwidth at long context",
        ("-m", "bench.gpu.kernels"),
        ENGINE,
        takes_s=40,
        limit_s=180,
    ),
    Row(
        "decode",
        "Llama-3-8B shape, batch 1, 8, 32, 128, 256 x context 1 k, 8 k: tokens/s, share of the roofline, gap between steps",
        "batch 1 ≥ 90 %, batch 256 ≥ 80 %; gap ≤ 2 %",
        ("-m", "bench.gpu.steps", "--part", "decode"),
        ENGINE,
        takes_s=60,
        limit_s=240,
    ),
    Row(
        "prefill",
        "Llama-3-8B shape, prompts of 2 k, 8 k, 32 k tokens: share of the matmul rate",
        "≥ 70 %",
        ("-m", "bench.gpu.steps", "--part", "prefill"),
        ENGINE,
        takes_s=35,
        limit_s=180,
    ),
    Row(
        "modes",
        "what graphs, overlap and a library's attention buy, and what --batch-invariant costs",
        "–",
        ("-m", "bench.gpu.modes"),
        ENGINE,
        takes_s=90,
        limit_s=300,
    ),
    Row(
        "http",
        "end to end over HTTP, ShareGPT-like lengths, at rates to saturation, beside the engine alone",
        "≥ 95 % of the engine's own",
        ("-m", "bench.gpu.serving"),
        PROCESSES,
        takes_s=95,
        limit_s=400,
    ),
    Row(
        "transformers",
        "transformers on the same machine and work: static and continuous batching",
        "–",
        ("-m", "bench.gpu.baseline"),
        (*ENGINE, "transformers"),
        takes_s=60,
        limit_s=300,
    ),
    Row(
        "timeline",
        "where a decode step goes at batch 1 and 256: the device's idle gap, and a Chrome trace",
        "gap ≤ 2 %",
        ("-m", "bench.gpu.timeline"),
        PROCESSES,
        takes_s=60,
        limit_s=240,
    ),
)


def rows_of(names: list[str]) -> list[Row]:
    """Return the rows of these names in the checklist's order; all of them for no name. Raises `ValueError`."""
    known = {row.name for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"no row is called {unknown[0]!r}; the rows are {', '.join(row.name for row in ROWS)}"
        )
    return [row for row in ROWS if not names or row.name in names]
