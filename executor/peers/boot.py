"""Opens the talk with other servers, as configured."""

from __future__ import annotations

import logging

from quintet.executor.disk.identity import parts_of, whole_of
from quintet.executor.features.kv_peer import PeerBlocks
from quintet.executor.peers.keys import read_key
from quintet.executor.runner import Runner
from quintet.wire.config import EngineConfig

log = logging.getLogger(__name__)


def open_kv_peers(runner: Runner, config: EngineConfig, first_host_block: int) -> PeerBlocks | None:
    """Return who talks with other servers of a runner's KV memory; None where there are to be none.

    first_host_block: the number of the first block that theirs come to. Raises `ConfigError` where nobody can listen.
    """
    peers = config.cache.peers
    if peers is None:
        return None
    num_blocks = config.model.kv.num_blocks
    parts = parts_of(config, type(runner).__name__)
    opened = PeerBlocks(
        runner.blocks,
        parts,
        whole_of(parts),
        peers.listen,
        read_key(peers.key_file),
        num_blocks(peers.offered_bytes),
        num_blocks(peers.staging_bytes),
        first_host_block,
    )
    if peers.listen:
        log.info("KV for other servers: %d blocks at %s", num_blocks(peers.offered_bytes), peers.listen)
    return opened
