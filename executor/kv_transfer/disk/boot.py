"""Open an engine's KV disk tier from its configuration."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from quintet.executor.kv_transfer.block_bytes import WholeBlocks
from quintet.executor.kv_transfer.disk.block_file import BlockFile
from quintet.executor.kv_transfer.features.kv_disk import DiskBlocks
from quintet.executor.kv_transfer.kv_identity import identity_of, parts_of, whole_of
from quintet.wire.config import EngineConfig
from quintet.wire.kv_tiers import EXCHANGE

log = logging.getLogger(__name__)


def open_kv_disk(blocks: WholeBlocks, config: EngineConfig, runner: str, first_host_block: int) -> DiskBlocks:
    """Return the disk tier of a KV memory. runner: name of the model runner.

    first_host_block: number of the first staging block. Raises `ConfigError` if the files cannot be opened.
    """
    disk = config.cache.disk
    assert disk is not None, "no disk tier is configured"
    num_blocks = config.model.kv.num_blocks
    folder = Path(disk.folder)
    file = BlockFile(folder, identity_of(config, runner), blocks.block_bytes, num_blocks(disk.size_bytes))
    log.info("KV on disk: %d of %d blocks in %s", len(file.kept()), file.num_places, folder)
    return DiskBlocks(
        blocks,
        file,
        num_blocks(disk.staging_bytes),
        first_host_block,
        folder.parent / EXCHANGE,
        cache(lambda: whole_of(parts_of(config, runner))),
    )
