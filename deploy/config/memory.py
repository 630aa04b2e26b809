"""How much memory there is, how much of it KV gets, and how sizes are written."""

from __future__ import annotations

import re
from pathlib import Path

from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec

ATTENTION_SCRATCH_BYTES = 32 << 20
"""What attention keeps on a CPU beside KV, at most: sums of parts of long contexts that several threads share (csrc/cpu)."""

LEAST_KV_SHARE, MOST_KV_SHARE = 0.125, 0.4
"""Of the memory that a CPU has left beside weights: what KV gets of a machine that does other things as well, and at most."""
NUM_LONG_SEQUENCES = 4
"""Sequences of ``--max-model-len`` that KV memory has room for where `MOST_KV_SHARE` allows it."""

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 1000,
    "m": 1 << 20, "mib": 1 << 20, "mb": 1000**2,
    "g": 1 << 30, "gib": 1 << 30, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(value: int | str, flag: str) -> int:
    """Read ``2GiB``, ``512M``, ``1.5 GB`` or a plain number of bytes. ``flag`` is named in the error."""
    matched = _SIZE.fullmatch(str(value))
    unit = _UNITS.get(matched[2].lower()) if matched else None
    if matched is None or unit is None:
        raise ConfigError(f"{flag} is {value!r}; write a size like 2GiB, 512MiB or a number of bytes")
    return int(float(matched[1]) * unit)


def format_size(size_bytes: float) -> str:
    """Write a size in the largest binary unit that keeps it at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def available_ram_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return memory that new processes could take without swapping: the host's, or the container's if that is less."""
    import psutil  # most of what asks for this module reads and writes sizes only

    available = int(psutil.virtual_memory().available)
    version_1 = cgroup_root / "memory"
    for folder, limit, usage, reclaimable in (
        (cgroup_root, "memory.max", "memory.current", "inactive_file"),
        (version_1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        left = _cgroup_left(folder / limit, folder / usage, folder / "memory.stat", reclaimable)
        if left is not None:
            available = min(available, left)
    return available


def default_kv_memory(kv: KvSpec, left_bytes: int, max_model_len: int, step_tokens: int) -> int:
    """Return the KV memory of a CPU where none is asked for: enough for a few long sequences, little of a small machine.

    left_bytes: what weights and scratch memory leave of the free memory.
    """
    few_sequences = NUM_LONG_SEQUENCES * kv.most_blocks(max_model_len, step_tokens) * kv.bytes_per_block
    return min(int(left_bytes * MOST_KV_SHARE), max(int(left_bytes * LEAST_KV_SHARE), few_sequences))


def _cgroup_left(limit_file: Path, usage_file: Path, stat_file: Path, reclaimable: str) -> int | None:
    """Return what a control group may still take, or None where there is no limit.

    Cached file pages that the kernel would give back (such as weights read earlier) count as free.
    """
    try:
        limit, usage = limit_file.read_text().strip(), usage_file.read_text().strip()
        stat = dict(line.split() for line in stat_file.read_text().splitlines())
    except OSError:
        return None
    if not limit.isdigit() or not usage.isdigit():
        return None
    return max(0, int(limit) - int(usage) + int(stat.get(reclaimable, 0)))
