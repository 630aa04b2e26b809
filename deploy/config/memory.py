"""Available memory, default KV cache size, and parsing and formatting of sizes."""

from __future__ import annotations

import re
from pathlib import Path

from quintet.process.control_groups import SYSTEM, group_folders
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec

ATTENTION_SCRATCH_BYTES = 32 << 20
"""Maximum scratch memory of CPU attention: partial sums of long contexts split over threads (csrc/cpu)."""

LEAST_KV_SHARE, MOST_KV_SHARE = 0.125, 0.4
"""Minimum and maximum default share of KV in the memory that weights leave on a CPU."""
NUM_LONG_SEQUENCES = 4
"""Number of sequences of ``--max-model-len`` in the default KV memory, within `MOST_KV_SHARE`."""

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 1000,
    "m": 1 << 20, "mib": 1 << 20, "mb": 1000**2,
    "g": 1 << 30, "gib": 1 << 30, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(value: int | str, flag: str) -> int:
    """Parse ``2GiB``, ``512M``, ``1.5 GB`` or a plain number of bytes. Raises `ConfigError` with ``flag``."""
    matched = _SIZE.fullmatch(str(value))
    unit = _UNITS.get(matched[2].lower()) if matched else None
    if matched is None or unit is None:
        raise ConfigError(f"{flag} is {value!r}; write a size like 2GiB, 512MiB or a number of bytes")
    return int(float(matched[1]) * unit)


def format_size(size_bytes: float) -> str:
    """Format a size in the largest binary unit in which it is at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def available_ram_bytes(system: Path = SYSTEM) -> int:
    """Return the memory available without swapping: the host's, or that of a control group of this process if less."""
    import psutil  # most importers only parse and format sizes

    available = int(psutil.virtual_memory().available)
    unified, version_1 = group_folders("memory", system)
    for folders, limit, usage, reclaimable in (
        (unified, "memory.max", "memory.current", "inactive_file"),
        (version_1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in folders:
            left = _cgroup_left(folder / limit, folder / usage, folder / "memory.stat", reclaimable)
            if left is not None:
                available = min(available, left)
    return available


def default_kv_memory(kv: KvSpec, left_bytes: int, max_model_len: int, step_tokens: int) -> int:
    """Return the default KV memory on a CPU: `NUM_LONG_SEQUENCES` long sequences, within the two shares.

    left_bytes: free memory after weights and scratch memory.
    """
    few_sequences = NUM_LONG_SEQUENCES * kv.most_blocks(max_model_len, step_tokens) * kv.bytes_per_block
    return min(int(left_bytes * MOST_KV_SHARE), max(int(left_bytes * LEAST_KV_SHARE), few_sequences))


def _cgroup_left(limit_file: Path, usage_file: Path, stat_file: Path, reclaimable: str) -> int | None:
    """Return the memory left in a control group, or None without a limit.

    Reclaimable file pages, such as weights read earlier, count as free.
    """
    try:
        limit, usage = limit_file.read_text().strip(), usage_file.read_text().strip()
        stat = dict(line.split() for line in stat_file.read_text().splitlines())
    except OSError:
        return None
    if not limit.isdigit() or not usage.isdigit():
        return None
    return max(0, int(limit) - int(usage) + int(stat.get(reclaimable, 0)))
