"""Publish a msgpack file of batches with vLLM's classes until stdin ends. Runs in vLLM's environment."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

file, endpoint, replay_address = sys.argv[1:]
batches = [
    msgspec.msgpack.decode(each, type=KVEventBatch)
    for each in msgspec.msgpack.decode(Path(file).read_bytes(), type=list[bytes])
]
publisher = ZmqEventPublisher(0, endpoint, replay_address, topic="kv@")
for batch in batches:
    publisher.publish(batch)
sys.stdin.read()
publisher.shutdown()
