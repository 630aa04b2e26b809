"""Measures what the machine can do at most, in the same minutes as the engines: rates drift by a quarter within hours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
_SOURCES = (Path(__file__).with_name("limits.cpp"), _KERNELS / "runtime/cores.cpp")
"""The probe, and which processors threads are kept on, as the kernels' own are."""


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
    """The last two: of the matrix unit; records of before have none."""
    weights_gb: float = 0.0
    """No rate: what a token reads of the row's model, where all engines are given the same file (GGUF)."""

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> Self:
        """Return the limits that a record holds among its figures."""
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
    """Compile the probe into ``home`` unless it is there and newer than its sources; return it."""
    program = home / "limits"
    if not program.exists() or program.stat().st_mtime < max(source.stat().st_mtime for source in _SOURCES):
        home.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-O3", "-std=c++20", "-pthread", f"-I{_KERNELS / 'runtime'}"]
        subprocess.run([*command, *map(str, _SOURCES), "-o", str(program)], check=True)
    return program


def measure_limits(program: Path, threads: int) -> Limits:
    """Run the probe: about three seconds of every core."""
    asked = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    return Limits(**json.loads(asked.stdout))
