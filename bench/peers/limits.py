"""Measure the machine's peak rates close to the measurements of the engines, since rates vary by a quarter within hours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
_SOURCES = (Path(__file__).with_name("limits.cpp"), _KERNELS / "runtime/cores.cpp")
"""The probe, and the kernels' thread pinning."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Peak rates with ``threads`` threads; a rate is 0 where the processor lacks the instruction."""

    threads: int
    read_gb_s: float
    bf16_gflop_s: float
    fp32_gflop_s: float
    int8_gop_s: float
    bf16_matrix_gflop_s: float = 0.0
    int8_matrix_gop_s: float = 0.0
    """The last two are rates of the matrix unit (AMX); older records have none."""
    weights_gb: float = 0.0
    """Size in GB of the weights that a token reads, for GGUF files; not a rate."""

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> Self:
        """Return the limits in a record's figures."""
        return cls(
            int(figures["threads"]),
            figures["read_gb_s"],
            figures["bf16_gflop_s"],
            figures["fp32_gflop_s"],
            figures["int8_gop_s"],
            figures.get("bf16_matrix_gflop_s", 0.0),
            figures.get("int8_matrix_gop_s", 0.0),
            figures.get("weights_gb", 0.0),
        )


def build_probe(home: Path) -> Path:
    """Compile the probe into ``home`` if it is missing or older than its sources; return its path."""
    program = home / "limits"
    if not program.exists() or program.stat().st_mtime < max(source.stat().st_mtime for source in _SOURCES):
        home.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-O3", "-std=c++20", "-pthread", f"-I{_KERNELS / 'runtime'}"]
        subprocess.run([*command, *map(str, _SOURCES), "-o", str(program)], check=True)
    return program


def measure_limits(program: Path, threads: int) -> Limits:
    """Run the probe; it takes about three seconds on all cores."""
    output = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    return Limits(**json.loads(output.stdout))
