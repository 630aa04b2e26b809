"""KV events over ZeroMQ: a subscriber tracks the engine's blocks and replays missed batches."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quintet.process.kv_publisher import KvPublisher
from quintet.wire.kv_events import KvEventsConfig
from tests.processes.server import Server, serve, wait_until

BLOCK_SIZE = 16
HERE = Path(__file__).parent
VLLM = Path.home() / ".cache/quintet-peers/vllm/bin/python"


@contextmanager
def socket_to(kind: int, address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        socket.connect(address)
        yield socket


def ask(server: Server, prompt: list[int], **more: object) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **more}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer


def replay_frames(replay_socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Request a replay of all batches; return the frames including the end marker."""
    replay_socket.send_multipart((b"", (0).to_bytes(8, "big")))
    frames = [replay_socket.recv_multipart()]
    while frames[-1][-1]:
        frames.append(replay_socket.recv_multipart())
    return frames


def replayed(replay_socket: zmq.Socket[bytes]) -> dict[int, list[Any]]:
    """Request a replay of all batches; return them by number."""
    *kept, end = replay_frames(replay_socket)
    assert end == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]
    assert {topic for _, topic, _, _ in kept} == {b"kv@"}
    batches = {int.from_bytes(number, "big"): msgspec.msgpack.decode(batch) for _, _, number, batch in kept}
    assert sorted(batches) == list(range(len(batches)))
    return batches


def replayed_until(replay_socket: zmq.Socket[bytes], expected: list[list[int]]) -> dict[int, list[Any]]:
    """Repeat the replay until it contains these blocks: a response may precede its events."""
    batches: dict[int, list[Any]] = {}

    def is_complete() -> bool:
        batches.clear()
        batches.update(replayed(replay_socket))
        return list(blocks_of([*batches.values()]).values()) == expected

    wait_until(is_complete, "events of these blocks")
    return batches


def wait_for_batch(replay_socket: zmq.Socket[bytes], number: int) -> None:
    """Request a replay until it contains the batch."""
    is_kept = False
    while not is_kept:
        replay_socket.send_multipart((b"", number.to_bytes(8, "big")))
        while replay_socket.recv_multipart()[3]:
            is_kept = True


def test_slow_reader_gets_all_buffered_batches(tmp_path: Path) -> None:
    published, replay_address, num_batches = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", 3000
    config = KvEventsConfig(
        endpoint=published,
        replay_endpoint=replay_address,
        buffer_steps=num_batches,
        hwm=2 * num_batches,
        topic="kv@",
    )
    publisher = KvPublisher(config, 0)
    for number in range(num_batches):
        publisher.publish(msgspec.msgpack.encode([number, "x" * 2000]))
    with socket_to(zmq.DEALER, replay_address) as slow, socket_to(zmq.DEALER, replay_address) as quick:
        wait_for_batch(quick, num_batches - 1)
        slow.send_multipart((b"", (0).to_bytes(8, "big")))
        assert slow.poll(30_000)  # the replay has started: later batches are buffered
        publisher.publish(b"one more")
        wait_for_batch(quick, num_batches)
        numbers = []
        while (frames := slow.recv_multipart())[3]:
            numbers.append(int.from_bytes(frames[2], "big"))
        assert numbers == list(range(num_batches))
    publisher.close()


def blocks_of(batches: list[list[Any]]) -> dict[int, list[int]]:
    """Return the blocks that a subscriber of these batches knows: hash -> tokens."""
    known: dict[int, list[int]] = {}
    for _, events, engine in batches:
        assert engine == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                known.clear()
            elif event["type"] == "BlockRemoved":
                for each in event["block_hashes"]:
                    del known[each]
            else:
                assert event["type"] == "BlockStored"
                assert (event["block_size"], event["medium"]) == (BLOCK_SIZE, "GPU")
                parent, tokens = event["parent_block_hash"], event["token_ids"]
                assert parent is None or parent in known
                for index, each in enumerate(event["block_hashes"]):
                    known[each] = tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
    return known


def test_subscriber_tracks_the_blocks_of_the_engine(tmp_path: Path) -> None:
    published, replay_address = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {
        "enable_kv_cache_events": True,
        "endpoint": published,
        "replay_endpoint": replay_address,
        "topic": "kv@",
    }
    flags = ("--executor", "mock", "--max-model-len", "256", "--kv-events-config", json.dumps(config))
    with (
        serve(*flags) as server,
        socket_to(zmq.SUB, published) as events,
        socket_to(zmq.DEALER, replay_address) as replay_socket,
    ):
        first, second = list(range(300, 340)), [*range(300, 316), *range(400, 440)]
        ask(server, first)
        published_first = [first[:16], first[16:32]]
        while not events.poll(500):  # batches before the subscription are only replayed
            published_first.append([1000 + len(published_first)] * 16)
            ask(server, [*published_first[-1], 5])
        batches = replayed_until(replay_socket, published_first)
        ask(server, second, cache_salt="mine")
        ask(server, second)
        expected = [*published_first, *[second[:16], second[16:32], second[32:48]] * 2]
        expected.remove(second[:16])  # shares its first block with `first`
        while sorted(blocks_of([*batches.values()]).values()) != sorted(expected):
            topic, number_bytes, batch = events.recv_multipart()
            assert topic == b"kv@"
            batches[int.from_bytes(number_bytes, "big")] = msgspec.msgpack.decode(batch)
            batches = dict(sorted(batches.items()))
        server.children()["quintet-core-0"].kill()
        ask(server, first)
        again = replayed_until(replay_socket, [first[:16], first[16:32]])
        assert again[0][1][0] == {"type": "AllBlocksCleared"}, "the first event of the new core"
        assert server.stop() == 0


@pytest.mark.whole
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed")
def test_batches_equal_those_of_vllms_publisher(tmp_path: Path) -> None:
    published, replay_address = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {
        "enable_kv_cache_events": True,
        "endpoint": published,
        "replay_endpoint": replay_address,
        "topic": "kv@",
    }
    # Twelve blocks: cached blocks are evicted for later prompts.
    flags = ("--executor", "mock", "--max-model-len", "96", "--max-num-seqs", "1")
    with (
        serve(*flags, "--kv-cache-memory", "384KiB", "--kv-events-config", json.dumps(config)) as server,
        socket_to(zmq.DEALER, replay_address) as replay_socket,
    ):
        for number in range(5):
            salt = {"cache_salt": "mine"} if number == 1 else {}
            ask(server, list(range(300 + number, 370 + number)), **salt)

        def is_published() -> bool:
            kinds = [event["type"] for batch in replayed(replay_socket).values() for event in batch[1]]
            return kinds.count("BlockStored") >= 5 and "BlockRemoved" in kinds

        wait_until(is_published, "events of the last prompt")
        ours = replay_frames(replay_socket)
    file, vllm_address = tmp_path / "batches", f"ipc://{tmp_path}/vllm"
    file.write_bytes(msgspec.msgpack.encode([frames[-1] for frames in ours[:-1]]))
    command = [VLLM, HERE / "vllm_publisher.py", file, vllm_address, f"{vllm_address}-replay"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as vllm,
        socket_to(zmq.DEALER, f"{vllm_address}-replay") as replay_socket,
    ):
        theirs: list[list[bytes]] = []

        def is_all() -> bool:
            assert vllm.poll() is None, "vLLM's classes failed to decode the batches"
            theirs[:] = replay_frames(replay_socket)
            return len(theirs) == len(ours)

        wait_until(is_all, "vLLM's publisher")
        vllm.communicate()
    assert theirs == ours
