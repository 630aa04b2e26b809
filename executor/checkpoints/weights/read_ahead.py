"""Has the disk read a model's weights, and memory made ready for them, while torch is still being imported. Imports no torch.

Nothing depends on it: what is in the page cache already, or cannot be read, is somebody else's business; so is memory of
which there turns out to be too little.
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

PIECE_BYTES = 16 << 20
"""Asked for at a time: one call for a whole file does not return before all of its pages have been reserved."""
MAX_SHARE_OF_MEMORY = 0.5
"""Of more than this, the first pages would be gone before they are used."""
ROOM = 1.25
"""Reserved, over what weights are expected to take. What is too much is given back."""
USUALLY_NEEDED = 0.9
"""Of what is expected: so much is made ready before it is known."""


def read_ahead(config: EngineConfig, whose: str = "") -> None:
    """Ask for the files that will be loaded, from a thread of its own. whose: see `packed_file`."""
    if hasattr(os, "posix_fadvise"):  # not on every system
        threading.Thread(target=_ask, args=(files_ahead(config, whose),), daemon=True).start()


def reserve_ahead(config: EngineConfig) -> HugeMemory | None:
    """Begin to make memory ready for packed weights, from a thread of its own, where this process may pack all of a model's.

    Whoever gets it uses it or gives it back.
    """
    executor = config.executor
    packs_all = (
        executor.device == "cpu" and executor.num_ranks == 1 and config.model.implementation == "quintet"
    )
    if not packs_all or executor.weight_bytes == 0 or executor.packed_cache is not None:
        return None
    try:
        memory = HugeMemory(int(executor.weight_bytes * ROOM))
    except OSError:  # a system that promises no more than it has
        return None
    memory.begin(int(executor.weight_bytes * USUALLY_NEEDED), min(1, spare_threads()))
    return memory


def files_ahead(config: EngineConfig, whose: str = "") -> Sequence[Path]:
    """Return the files of which the ranks of this host need every page: none of a checkpoint that other hosts have parts of.

    Which of its tensors are this host's follows from the model, which takes torch.
    """
    model, executor = config.model, config.executor
    if executor.packed_cache is not None:
        packed = packed_file(
            *(Path(executor.packed_cache), Path(model.path), executor.quantization, model.dtype),
            whose,
        )
        if packed.is_file():
            return [packed]
    if executor.num_hosts > 1:
        return []
    try:
        return checkpoint_files(Path(model.path))
    except ConfigError:
        return []


def _ask(paths: Sequence[Path]) -> None:
    left = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MAX_SHARE_OF_MEMORY)
    for path in paths:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                for begin in range(0, min(size, left), PIECE_BYTES):
                    os.posix_fadvise(file.fileno(), begin, PIECE_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        left -= min(size, left)
