"""Open the shared KV store from its configuration."""

from __future__ import annotations

import logging

from quintet.executor.kv_transfer.block_bytes import WholeBlocks
from quintet.executor.kv_transfer.features.kv_store import StoreBlocks
from quintet.executor.kv_transfer.kv_identity import parts_of, whole_of
from quintet.executor.kv_transfer.store.connector import open_connector
from quintet.wire.config import EngineConfig

log = logging.getLogger(__name__)


def open_kv_store(
    blocks: WholeBlocks, config: EngineConfig, runner: str, first_host_block: int
) -> StoreBlocks:
    """Return the store tier of a KV memory. runner: name of the model runner.

    first_host_block: number of the first staging block. Raises `ConfigError` if the store cannot be opened.
    """
    store = config.cache.store
    assert store is not None, "no store is configured"
    identity = whole_of(parts_of(config, runner))
    log.info("KV in %s, as %s", store.url, identity.hex()[:32])
    return StoreBlocks(
        blocks,
        open_connector(store),
        identity,
        config.model.kv.num_blocks(store.staging_bytes),
        first_host_block,
        store.waiting_bytes,
    )
