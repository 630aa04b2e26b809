"""Open the peer tier from its configuration."""

from __future__ import annotations

import logging

from quintet.executor.kv_transfer.block_bytes import WholeBlocks
from quintet.executor.kv_transfer.features.kv_peer import PeerBlocks
from quintet.executor.kv_transfer.kv_identity import parts_of, whole_of
from quintet.executor.kv_transfer.peers.keys import read_key
from quintet.wire.config import EngineConfig, KvPeersConfig

log = logging.getLogger(__name__)


def open_kv_peers(
    blocks: WholeBlocks, peers: KvPeersConfig, config: EngineConfig, runner: str, first_host_block: int
) -> PeerBlocks:
    """Return the peer tier of a KV memory. runner: name of the model runner.

    first_host_block: number of the first staging block. Raises `ConfigError` if the listen address is invalid.
    """
    num_blocks = config.model.kv.num_blocks
    parts = parts_of(config, runner)
    opened = PeerBlocks(
        blocks,
        parts,
        whole_of(parts),
        peers.listen,
        read_key(peers.key_file, "--kv-peer-key", b"quintet peers") if peers.key_file else None,
        num_blocks(peers.offered_bytes),
        num_blocks(peers.staging_bytes),
        first_host_block,
    )
    if peers.listen:
        log.info("KV for other servers: %d blocks at %s", num_blocks(peers.offered_bytes), peers.listen)
    return opened
