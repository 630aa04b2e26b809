"""Rows of the GPU checklist: what each shows, its command, its packages, and its time limit."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

PYTEST = (
    *("-m", "pytest", "--whole", "-p", "no:cacheprovider"),
    *("-o", "addopts=-q --strict-markers --import-mode=importlib"),
    *(
        "-o",
        "filterwarnings=default",
    ),  # a deprecation warning of another torch version must not fail a GPU test
)

DEVICE = ("torch", "numpy", "cupy")
ENGINE = (*DEVICE, "msgspec", "tqdm", "safetensors")
TESTS = (*ENGINE, "pytest", "transformers", "llguidance", "gguf")
"""Tests create small models with transformers and gguf, and compile grammars with llguidance."""
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
    """A row of the checklist. Its command, without the interpreter, accepts ``--figures FILE`` and ``--device cuda|cpu``."""

    name: str
    shows: str
    target: str
    command: tuple[str, ...]
    needs: tuple[str, ...]
    """Required modules; the row is skipped if one is missing."""
    takes_s: int
    """Approximate duration on one H200, for the time budget of a first run."""
    limit_s: int
    """Time limit, after which the row's processes are killed."""
    gpus: int = 1
    """Minimum number of GPUs; with fewer the row is skipped."""

    @property
    def words(self) -> str:
        """The command as a user types it."""
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
        " numbers; models give the tokens of the dequantized model, with the same bits in chunks and in batches",
        "all pass",
        (*PYTEST, "tests/gpu/test_kernels.py", "-k", "coded"),
        TESTS,
        takes_s=20,
        limit_s=300,
    ),
    Row(
        "kinds",
        "one model of each kind of layer (ALiBi, parallel residual, caps, two rotations, experts, latents, states): tokens are"
        " transformers', fp32; bits with --batch-invariant are the same in chunks and in batches, bf16",
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
        "captured graphs = eager, overlap on = off, swapping = recomputing = neither: the same tokens; drafts on = off:"
        " the same bits; graphs are captured again after others were dropped",
        "all equal",
        (*PYTEST, "tests/gpu/test_steps.py", "tests/gpu/test_drafts.py", "tests/gpu/test_graphs.py"),
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
        "out of memory in a step: the step is split, the tokens are the same, no process ends",
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
        "executor killed under load: the streams resume, no byte changes, its memory is freed",
        "all pass",
        (*PYTEST, "tests/gpu/test_kill.py"),
        (*PROCESSES, "pytest"),
        takes_s=45,
        limit_s=300,
    ),
    Row(
        "ranks",
        "a model on two GPUs: outputs in fp32 are those of one GPU, with graphs, without, and with --batch-invariant; a"
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
        "ceilings of the device: copies and reads of its memory, bf16 matrix products, copies to and from the host",
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
        "speedup by graphs, overlap and a library's attention, and cost of --batch-invariant",
        "–",
        ("-m", "bench.gpu.modes"),
        ENGINE,
        takes_s=90,
        limit_s=300,
    ),
    Row(
        "http",
        "end to end over HTTP, ShareGPT-like lengths, at rates to saturation, compared with the in-process engine",
        "≥ 95 % of the in-process engine",
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
        "timeline of a decode step at batch 1 and 256: the device's idle gap, and a Chrome trace",
        "gap ≤ 2 %",
        ("-m", "bench.gpu.timeline"),
        PROCESSES,
        takes_s=60,
        limit_s=240,
    ),
)


def rows_of(names: list[str]) -> list[Row]:
    """Return the rows with these names in the checklist's order, or all rows without names. Raises `ValueError`."""
    known = {row.name for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown row {unknown[0]!r}; allowed: {', '.join(row.name for row in ROWS)}")
    return [row for row in ROWS if not names or row.name in names]
