"""Prefetch a model's weights from disk and reserve their memory during the import of torch. Imports no torch.

Best effort: cached pages, unreadable files and insufficient memory are ignored.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory, spare_threads
from quintet.executor.checkpoints.weights.files import checkpoint_files, packed_file
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError

CHUNK_BYTES = 16 << 20
"""Bytes of one request; a request for a whole file blocks until all of its pages are reserved."""
MAX_SHARE_OF_MEMORY = 0.5
"""Maximum fraction of memory; beyond it the first pages are evicted before use."""
RESERVE_FACTOR = 1.25
"""Reservation over expected weight size. The excess is returned."""
USUALLY_NEEDED = 0.9
"""Fraction of the expected size that is faulted in early."""


def read_ahead(config: EngineConfig, rank_label: str = "") -> None:
    """Prefetch the files that will be loaded, on a background thread. rank_label: see `packed_file`."""
    if hasattr(os, "posix_fadvise"):  # Linux only
        threading.Thread(target=_prefetch, args=(files_ahead(config, rank_label),), daemon=True).start()


def reserve_ahead(config: EngineConfig) -> HugeMemory | None:
    """Reserve memory for packed weights on a background thread; None unless this process packs all weights.

    The caller uses or returns the memory.
    """
    executor = config.executor
    packs_all = (
        executor.device == "cpu" and executor.num_ranks == 1 and config.model.implementation == "quintet"
    )
    if not packs_all or executor.weight_bytes == 0 or executor.packed_cache is not None:
        return None
    try:
        memory = HugeMemory(int(executor.weight_bytes * RESERVE_FACTOR))
    except OSError:  # a system without overcommit
        return None
    memory.begin(int(executor.weight_bytes * USUALLY_NEEDED), min(1, spare_threads()))
    return memory


def files_ahead(config: EngineConfig, rank_label: str = "") -> Sequence[Path]:
    """Return the files that the ranks of this host read completely; none if other hosts share the checkpoint.

    The tensors of one host depend on the model, which needs torch.
    """
    model, executor = config.model, config.executor
    if executor.packed_cache is not None:
        packed = packed_file(
            *(Path(executor.packed_cache), Path(model.path), executor.quantization, model.dtype),
            rank_label,
        )
        if packed.is_file():
            return [packed]
    if executor.num_hosts > 1:
        return []
    try:
        return checkpoint_files(Path(model.path))
    except ConfigError:
        return []


def _prefetch(paths: Sequence[Path]) -> None:
    left = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MAX_SHARE_OF_MEMORY)
    for path in paths:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                for begin in range(0, min(size, left), CHUNK_BYTES):
                    os.posix_fadvise(file.fileno(), begin, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        left -= min(size, left)
