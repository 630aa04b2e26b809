"""Run by vLLM's Python: its own classes read batches, a file of msgpack, and its own publisher tells them until input ends."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

file, published, asked = sys.argv[1:]
batches = [
    msgspec.msgpack.decode(each, type=KVEventBatch)
    for each in msgspec.msgpack.decode(Path(file).read_bytes(), type=list[bytes])
]
publisher = ZmqEventPublisher(0, published, asked, topic="kv@")
for batch in batches:
    publisher.publish(batch)
sys.stdin.read()
publisher.shutdown()
