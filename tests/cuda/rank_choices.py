"""Ranks that choose at boot, without kernels: threads over the shared memory that server processes use."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tests.cuda.rank_devices import run_concurrently

from quintet.executor.backends.cuda.ranks.rank_broadcast import device_ranks_shape
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.model_config.share import Share

ChoiceT = TypeVar("ChoiceT")


def chosen_by(size: int, choose: Callable[[Ranks], ChoiceT]) -> list[ChoiceT]:
    """Return the choice of each rank."""
    descriptor = os.memfd_create("ranks")
    try:
        ranks = [
            Ranks(descriptor, Share(rank, size), device_ranks_shape(size), spins=0) for rank in range(size)
        ]
        return run_concurrently([partial(choose, each) for each in ranks])
    finally:
        os.close(descriptor)
