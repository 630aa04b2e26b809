"""KV events over ZeroMQ: a plain subscriber knows what the engine has, also of what it missed."""

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
from quintet.wire.config import KvEventsConfig
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


def sent_again(missed: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Ask for all batches from the first on; return what comes, up to the end of it."""
    missed.send_multipart((b"", (0).to_bytes(8, "big")))
    frames = [missed.recv_multipart()]
    while frames[-1][-1]:
        frames.append(missed.recv_multipart())
    return frames


def heard_again(missed: zmq.Socket[bytes]) -> dict[int, list[Any]]:
    """Ask for all batches from the first on; return them by number."""
    *kept, end = sent_again(missed)
    assert end == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]
    assert {topic for _, topic, _, _ in kept} == {b"kv@"}
    batches = {int.from_bytes(number, "big"): msgspec.msgpack.decode(batch) for _, _, number, batch in kept}
    assert sorted(batches) == list(range(len(batches)))
    return batches


def heard_of(missed: zmq.Socket[bytes], wanted: list[list[int]]) -> dict[int, list[Any]]:
    """Ask for all batches until they tell of these blocks: an answer may be here before what the core tells behind it."""
    batches: dict[int, list[Any]] = {}

    def tell() -> bool:
        batches.clear()
        batches.update(heard_again(missed))
        return list(known_by([*batches.values()]).values()) == wanted

    wait_until(tell, "events of these blocks")
    return batches


def wait_for_batch(asks: zmq.Socket[bytes], number: int) -> None:
    """Ask for a batch until it is kept."""
    is_kept = False
    while not is_kept:
        asks.send_multipart((b"", number.to_bytes(8, "big")))
        while asks.recv_multipart()[3]:
            is_kept = True


def test_who_reads_slowly_is_sent_all_that_was_kept(tmp_path: Path) -> None:
    published, asked, num_batches = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", 3000
    config = KvEventsConfig(
        endpoint=published, replay_endpoint=asked, buffer_steps=num_batches, hwm=2 * num_batches, topic="kv@"
    )
    publisher = KvPublisher(config, 0)
    for number in range(num_batches):
        publisher.publish(msgspec.msgpack.encode([number, "x" * 2000]))
    with socket_to(zmq.DEALER, asked) as slow, socket_to(zmq.DEALER, asked) as quick:
        wait_for_batch(quick, num_batches - 1)
        slow.send_multipart((b"", (0).to_bytes(8, "big")))
        assert slow.poll(
            30_000
        )  # it is being answered: what is published from here on is kept when that is done
        publisher.publish(b"one more")
        wait_for_batch(quick, num_batches)
        numbers = []
        while (heard := slow.recv_multipart())[3]:
            numbers.append(int.from_bytes(heard[2], "big"))
        assert numbers == list(range(num_batches))
    publisher.close()


def known_by(batches: list[list[Any]]) -> dict[int, list[int]]:
    """Return what a router knows that has heard these batches: by hash, the tokens of each block."""
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


def test_a_subscriber_knows_what_the_engine_has(tmp_path: Path) -> None:
    published, asked = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"enable_kv_cache_events": True, "endpoint": published, "replay_endpoint": asked, "topic": "kv@"}
    flags = ("--executor", "mock", "--max-model-len", "256", "--kv-events-config", json.dumps(config))
    with (
        serve(*flags) as server,
        socket_to(zmq.SUB, published) as events,
        socket_to(zmq.DEALER, asked) as missed,
    ):
        first, second = list(range(300, 340)), [*range(300, 316), *range(400, 440)]
        ask(server, first)
        batches = heard_of(missed, [first[:16], first[16:32]])
        ask(server, second, cache_salt="mine")
        ask(server, second)
        wanted = [first[:16], first[16:32], *[second[:16], second[16:32], second[32:48]] * 2]
        wanted.remove(second[:16])  # it begins like the first one
        while sorted(known_by([*batches.values()]).values()) != sorted(wanted):
            topic, number_bytes, batch = events.recv_multipart()
            assert topic == b"kv@"
            batches[int.from_bytes(number_bytes, "big")] = msgspec.msgpack.decode(batch)
            batches = dict(sorted(batches.items()))
        server.children()["quintet-core-0"].kill()
        ask(server, first)
        again = heard_of(missed, [first[:16], first[16:32]])
        assert again[0][1][0] == {"type": "AllBlocksCleared"}, "another core begins"
        assert server.stop() == 0


@pytest.mark.whole
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed beside")
def test_vllms_own_classes_read_it_and_would_have_told_the_same(tmp_path: Path) -> None:
    published, asked = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"enable_kv_cache_events": True, "endpoint": published, "replay_endpoint": asked, "topic": "kv@"}
    # Twelve blocks: what is found is given away for what comes.
    flags = ("--executor", "mock", "--max-model-len", "96", "--max-num-seqs", "1")
    with (
        serve(*flags, "--kv-cache-memory", "384KiB", "--kv-events-config", json.dumps(config)) as server,
        socket_to(zmq.DEALER, asked) as missed,
    ):
        for number in range(5):
            salt = {"cache_salt": "mine"} if number == 1 else {}
            ask(server, list(range(300 + number, 370 + number)), **salt)

        def is_told() -> bool:
            kinds = [event["type"] for batch in heard_again(missed).values() for event in batch[1]]
            return kinds.count("BlockStored") >= 5 and "BlockRemoved" in kinds

        wait_until(is_told, "events of the last prompt")
        ours = sent_again(missed)
    file, of_vllm = tmp_path / "batches", f"ipc://{tmp_path}/vllm"
    file.write_bytes(msgspec.msgpack.encode([frames[-1] for frames in ours[:-1]]))
    command = [VLLM, HERE / "vllm_publisher.py", file, of_vllm, f"{of_vllm}-asked"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as vllm,
        socket_to(zmq.DEALER, f"{of_vllm}-asked") as missed,
    ):
        theirs: list[list[bytes]] = []

        def is_all() -> bool:
            assert vllm.poll() is None, "vLLM's classes did not read it"
            theirs[:] = sent_again(missed)
            return len(theirs) == len(ours)

        wait_until(is_all, "vLLM's publisher")
        vllm.communicate()
    assert theirs == ours
