"""Rows of the table and the token ids of their requests, which are seeded and equal for all engines.

Lengths depend on the row alone. Ids depend on row, repetition and try, so that no measurement hits a prefix cached by an earlier
one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from bench.peers.dimensions import DIMENSIONS
from bench.peers.jobs import Job
from bench.peers.models import MAX_LEN

Precision = Literal["bf16", "int8", "int4", "w8a8", "q8_0", "q4_0", "q4_k_m", "q6_k", "mxfp4"]
GGUF_FILES: tuple[Precision, ...] = ("q8_0", "q4_0", "q4_k_m", "q6_k", "mxfp4")
"""Formats of GGUF files; all engines of such a row read the same file."""
_SMALL: tuple[Precision, ...] = ("q8_0", "q4_0", "q4_k_m", "q6_k")
_L_FORMATS: tuple[Precision, ...] = ("q4_k_m", "q8_0")
_CLIENTS_FORMATS: tuple[Precision, ...] = ("q4_k_m", "q8_0")
Mode = Literal["serve", "offline"]
"""``serve``: through the engine's HTTP server if it has one; ``offline``: through its Python API."""
Pattern = Literal["stream", "prompt", "clients", "offline", "prefix", "boot"]

FIRST_ID = 256
"""Lowest token id of prompts; ids below are single bytes, which may be incomplete characters."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a row."""

    key: str
    words: str
    unit: str
    higher_is_better: bool = True
    goal: str = ""
    """Target of the row, as text."""
    shows_limit: bool = False
    """True if the table shows the machine's limit."""
    digits: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: load, model and figures."""

    id: str
    words: str
    model: str
    precision: Precision
    mode: Mode
    pattern: Pattern
    figures: tuple[Figure, ...]
    num_prompts: int = 1
    clients: int = 1
    input_len: tuple[int, int] = (128, 128)
    output_len: tuple[int, int] = (128, 128)
    shared_len: int = 0
    engines: int = 1
    """Replicas of the model on one port, which share the threads."""
    flags: tuple[str, ...] = ()
    """Additional arguments of Quintet."""


_WORDS: dict[Precision, str] = {
    "bf16": "bf16",
    "int8": "8-bit weights",
    "int4": "4-bit weights",
    "w8a8": "8-bit weights and activations",
    **{precision: f"GGUF of {precision.upper()}" for precision in GGUF_FILES},
}


def _stream(model: str, precision: Precision, goal: str) -> Row:
    words = f"{model}, {_WORDS[precision]}, one stream, 128 in / 128 out"
    figure = Figure("decode_tok_s", "", "tok/s", goal=goal, shows_limit=True)
    return Row(f"stream-{model}-{precision}", words, model, precision, "serve", "stream", (figure,))


def _prompt(model: str, precision: Precision, goal: str) -> Row:
    words = f"{model}, {_WORDS[precision]}, one 2 048-token prompt"
    figure = Figure("prompt_tok_s", "", "tok/s", goal=goal, shows_limit=True, digits=0)
    return Row(
        f"prompt-{model}-{precision}", words, model, precision, "serve", "prompt", (figure,),
        input_len=(2048, 2048), output_len=(1, 1),
    )  # fmt: skip


def _with_int8(row: Row) -> Row:
    """Return the same row with 8-bit activations."""
    flags = ("--activation-dtype", "int8")
    return replace(
        row, id=f"{row.id}-inputs8", words=f"{row.words}, Quintet with {' '.join(flags)}", flags=flags
    )


def _clients(clients: int, waves: int, figures: tuple[Figure, ...], precision: Precision = "bf16") -> Row:
    words = f"S, {_WORDS[precision]}, {clients} clients, 256 in / 64 out"
    return Row(
        f"clients{clients}-S-{precision}", words, "S", precision, "serve", "clients", figures, clients * waves,
        clients, (256, 256), (64, 64),
    )  # fmt: skip


def _offline(model: str, precision: Precision, num_prompts: int, goal: str) -> Row:
    words = f"{model}, {_WORDS[precision]}, offline, {num_prompts} prompts of 64–512 in / 32–128 out"
    figure = Figure("output_tok_s", "", "tok/s", goal=goal, shows_limit=True)
    return Row(
        f"offline-{model}-{precision}", words, model, precision, "offline", "offline", (figure,), num_prompts,
        num_prompts, (64, 512), (32, 128),
    )  # fmt: skip


_OUTPUT = Figure("output_tok_s", "output", "tok/s", goal="≥ 145")
_TTFT = Figure("ttft_p50_s", "time to first token p50", "s", False, "≤ 1.2", digits=2)
_INTER_TOKEN = Figure("inter_token_p99_s", "between tokens p99", "s", False, "", digits=2)
_DURATION = Figure("duration_s", "", "s", False, "≤ 3", digits=2)

ROWS: tuple[Row, ...] = (
    _stream("S", "bf16", "≥ llama.cpp, ≥ 95 % of the limit"),
    _prompt("S", "bf16", "≥ 1 020, 90 % of the limit"),
    _clients(8, 2, (_OUTPUT, _TTFT, _INTER_TOKEN)),
    _clients(
        32,
        2,
        (
            replace(_OUTPUT, goal="≥ 200", shows_limit=True),
            replace(_TTFT, goal=""),
            replace(_INTER_TOKEN, goal="≤ 0.4"),
        ),
    ),
    Row(
        "clients32-S-bf16-450ms", "S, bf16, 32 clients, 256 in / 64 out, Quintet with --step-target-ms 450", "S", "bf16",
        "serve", "clients", (replace(_OUTPUT, goal=""), replace(_TTFT, goal="≤ that of the fastest peer"), _INTER_TOKEN), 64, 32,
        (256, 256), (64, 64), flags=("--step-target-ms", "450"),
    ),
    Row(
        "prefix-S-bf16", "S, bf16, 32 at once sharing a 1 024-token prefix, 16 out", "S", "bf16", "serve", "prefix",
        (_DURATION,), 32, 32, (1056, 1056), (16, 16), shared_len=1024,
    ),
    Row(
        "replicas2-S-bf16", "S, bf16, two replicas, 16 clients, 256 in / 64 out", "S", "bf16", "serve", "clients",
        (replace(_OUTPUT, goal=""), replace(_TTFT, goal=""), _INTER_TOKEN), 32, 16, (256, 256), (64, 64), engines=2,
    ),
    _offline("S", "bf16", 64, "≥ 215"),
    _stream("S", "int8", "≥ 72"),
    _stream("S", "int4", "≥ 95"),
    _prompt("S", "w8a8", "≥ 1 700"),
    _stream("M", "bf16", "≥ llama.cpp, ≥ 95 % of the limit"),
    _prompt("M", "bf16", "≥ 395, 90 % of the limit"),
    _offline("M", "bf16", 16, "≥ 75"),
    _stream("M", "int8", "≥ 29"),
    _stream("M", "int4", "≥ 50"),
    _offline("M", "w8a8", 16, "≥ 100"),
    Row(
        "boot-S-bf16", "S, bf16, process start → first token", "S", "bf16", "serve", "boot",
        (
            Figure("boot_s", "", "s", False, "≤ 3", digits=2),
            Figure("pss_gb", "memory of all processes (PSS)", "GB", False, "≤ 1.9", digits=2),
        ),
        input_len=(16, 16), output_len=(1, 1),
    ),
    *(_stream(model, precision, "≥ 1.25 × llama.cpp, ≥ 88 % of the limit") for model in ("S", "M") for precision in _SMALL),
    *(_stream("L", precision, "≥ 1.25 × llama.cpp, ≥ 88 % of the limit") for precision in _L_FORMATS),
    _stream("E", "mxfp4", "≥ 1.25 × llama.cpp"),
    *(_prompt(model, precision, "≥ 2 × llama.cpp") for model in ("S", "M") for precision in ("q8_0", "q4_k_m")),
    _prompt("L", "q4_k_m", "≥ 2 × llama.cpp"),
    _prompt("E", "mxfp4", "≥ 2 × llama.cpp"),
    *(
        _with_int8(_stream(model, precision, "≥ 1.25 × llama.cpp, ≥ 88 % of the limit"))
        for model in ("S", "M") for precision in _SMALL
    ),
    _with_int8(_stream("L", "q4_k_m", "≥ 1.25 × llama.cpp, ≥ 88 % of the limit")),
    _with_int8(_stream("E", "mxfp4", "≥ 1.25 × llama.cpp")),
    *(_with_int8(_prompt(model, precision, "≥ 2 × llama.cpp")) for model in ("S", "M") for precision in ("q8_0", "q4_k_m")),
    _with_int8(_prompt("L", "q4_k_m", "≥ 2 × llama.cpp")),
    _with_int8(_prompt("E", "mxfp4", "≥ 2 × llama.cpp")),
    *(
        _clients(clients, 2, (replace(_OUTPUT, goal="≥ 2 × llama.cpp"),), precision)
        for precision in _CLIENTS_FORMATS for clients in (8, 32)
    ),
)  # fmt: skip


def warm_up_of(row: Row) -> Job:
    """Return the warm-up job of a row: fewer and shorter requests."""
    input_lens, output_lens = _lengths(row)
    num_warm = min(row.num_prompts, 8)
    shorter = [min(n, 8) for n in output_lens[:num_warm]]
    return _job(row, input_lens[:num_warm], shorter, f"ids of {row.id}, warming up")


def job_of(row: Row, repetition: int, attempt: int = 0) -> Job:
    """Return the job of a row for one try of a repetition."""
    return _job(row, *_lengths(row), f"ids of {row.id}, repetition {repetition}, try {attempt}")


def _lengths(row: Row) -> tuple[list[int], list[int]]:
    """Return the prompt lengths and output lengths of the requests."""
    lengths = random.Random(
        f"lengths of {row.num_prompts} prompts of {row.input_len} in, {row.output_len} out"
    )
    input_lens = [lengths.randint(*row.input_len) for _ in range(row.num_prompts)]
    return input_lens, [lengths.randint(*row.output_len) for _ in range(row.num_prompts)]


def _context_len(row: Row) -> int:
    """Return the longest context of the row's jobs, including the warm-up."""
    return MAX_LEN if row.clients == 1 else max(a + b for a, b in zip(*_lengths(row), strict=True))


def _job(row: Row, input_lens: list[int], output_lens: list[int], seed: str) -> Job:
    ids = random.Random(seed)
    last_id = DIMENSIONS[row.model].vocab_size - 4

    def draw(num: int) -> list[int]:
        return [ids.randint(FIRST_ID, last_id) for _ in range(num)]

    shared = draw(row.shared_len)
    prompts = [shared + draw(n - row.shared_len) for n in input_lens]
    return Job(prompts, output_lens, row.clients, _context_len(row))
