"""KV of peer servers, device side: blocks are copied unchanged between servers, or reported missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from tests.processes.test_disaggregation import free_port

from quintet.executor.kv_transfer.block_bytes import BlockBytes
from quintet.executor.kv_transfer.peers import link, messages
from quintet.executor.kv_transfer.peers.back_end import PeerBackEnd
from quintet.executor.kv_transfer.peers.keys import PeerKey, read_key
from quintet.executor.kv_transfer.peers.link import Link, PeerLost
from quintet.executor.kv_transfer.peers.messages import (
    Ask,
    BlockReply,
    BlocksMissing,
    IdentityMismatch,
    OwnIdentity,
)
from quintet.wire.codec import encode, pack_i32, unpack_i32
from quintet.wire.errors import ConfigError
from quintet.wire.kv_tiers import Fetch, KvTierRequests, Store

NUM_BLOCKS, LAYER_BYTES, FIRST = 6, 40, 10
HOST_BLOCKS = range(FIRST, FIRST + 4)
KEYS = [bytes([number]) * 32 for number in range(1, 5)]
PARTS = {"weights": "w", "hf_config": "c"}
KEY = PeerKey(*zmq.curve_keypair())
OWN = OwnIdentity(KEY, b"w" * 32, PARTS)


def fetch(peer: str, host_blocks: list[int], keys: list[bytes], tables: int = 0) -> KvTierRequests:
    wanted = Fetch(peer.encode(), 1, pack_i32([0] * len(keys)), pack_i32(host_blocks), keys)
    return KvTierRequests(tables, "peer", fetches=[wanted])


class Side:
    """Two layers of KV memory with a peer connection, and the loop that waits for results."""

    def __init__(
        self,
        shade: int,
        key: PeerKey = KEY,
        identity: bytes = b"w" * 32,
        num_offered: int = 8,
        address: str = "",
    ) -> None:
        self.layers = [
            torch.arange(NUM_BLOCKS * LAYER_BYTES).reshape(NUM_BLOCKS, -1).to(torch.uint8) + layer + shade
            for layer in range(2)
        ]
        self.address = address or f"127.0.0.1:{free_port()}"
        parts = PARTS | {"weights": identity.hex()}
        self.peers = PeerBackEnd(
            BlockBytes(self.layers), HOST_BLOCKS, OwnIdentity(key, identity, parts), self.address, num_offered
        )
        self._rung = threading.Event()
        self.peers.begin(self._rung.set)

    def offer(self, blocks: list[int], keys: list[bytes], tables: int = 0) -> None:
        self.peers.order(KvTierRequests(tables, "peer", [Store(pack_i32(blocks), keys)]))

    def pull(self, peer: str, host_blocks: list[int], keys: list[bytes]) -> tuple[list[int], list[int]]:
        """Return the pulled blocks and the missing ones."""
        self.peers.order(fetch(peer, host_blocks, keys))
        pulled, lacking = list[int](), list[int]()
        while len(pulled) + len(lacking) < len(keys):
            assert self._rung.wait(30.0)
            self._rung.clear()
            answers = self.peers.take_results()
            if answers is not None:
                pulled += unpack_i32(answers.fetched)
                lacking += unpack_i32(answers.missed)
        return sorted(pulled), sorted(lacking)


@pytest.fixture
def closed() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@contextmanager
def raw_socket(kind: int, peer: str = "", key: PeerKey | None = KEY) -> Iterator[zmq.Socket[bytes]]:
    """Yield a client of a peer, or a listening socket, with the key."""
    with zmq.Context() as context, context.socket(kind) as raw:
        raw.linger = 0
        if key is not None:
            key.protect(raw, listens=kind == zmq.ROUTER)
        if peer:
            raw.connect(f"tcp://{peer}")
        yield raw


def sides(closed: ExitStack, **options: object) -> tuple[Side, Side]:
    both = Side(0), Side(100, **options)  # type: ignore[arg-type]
    for side in both:
        closed.callback(side.peers.close)
    return both


def test_blocks_are_pulled_as_they_were_when_offered(closed: ExitStack, tmp_path: object) -> None:
    gives, takes = sides(closed)
    before = [layer.clone() for layer in gives.layers]
    gives.offer([2, 3], KEYS[:2])
    for layer in gives.layers:
        layer.zero_()  # the next plan overwrites the blocks
    pulled = takes.pull(gives.address, [FIRST + 1, FIRST, FIRST + 2], [KEYS[1], KEYS[0], KEYS[3]])
    assert pulled == ([FIRST, FIRST + 1], [FIRST + 2])
    takes.peers.copy_in(np.array([0, 4], np.int32), np.array([FIRST, FIRST + 1], np.int32))
    for layer, original in zip(takes.layers, before, strict=True):
        assert torch.equal(layer[[0, 4]], original[[2, 3]])


def test_a_large_pull_takes_several_requests(closed: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "WINDOW_BYTES", 1)
    gives, takes = sides(closed)
    gives.offer([0, 1, 2, 3], KEYS)
    assert takes.pull(gives.address, [13, 12, 11, 10], KEYS) == ([10, 11, 12, 13], [])


def test_a_peer_that_does_not_read_replies_costs_bounded_memory(
    closed: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "WINDOW_BYTES", 4 * LAYER_BYTES)  # two blocks
    gives, _ = sides(closed)
    gives.offer([0, 1, 2, 3], KEYS)
    server = gives.peers._server
    assert server is not None and server.socket.get(zmq.SNDHWM) == 4
    with raw_socket(zmq.DEALER, gives.address) as client:
        for number, keys in enumerate((KEYS, KEYS[:1], [b"u" * 32])):
            client.send(encode(Ask(messages.VERSION, number, b"w" * 32, keys)))
        answers = [client.recv_multipart() for _ in range(2)]
    assert [len(frames) for frames in answers] == [2, 1], "a request for several blocks is ignored"
    assert answers[-1] == [encode(BlocksMissing(2, [0]))]


def test_the_oldest_offer_is_dropped(closed: ExitStack) -> None:
    _, takes = sides(closed)
    small = Side(0, num_offered=2)
    closed.callback(small.peers.close)
    small.offer([0, 1], KEYS[:2])
    small.offer([2], KEYS[:1])
    small.offer([3], KEYS[2:3])
    assert takes.pull(small.address, [10, 11, 12], KEYS[:3]) == ([10, 12], [11])


def test_a_peer_with_other_weights_is_rejected_by_name(
    closed: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    gives, takes = sides(closed, identity=b"x" * 32)
    gives.offer([2], KEYS[:1])
    assert takes.pull(gives.address, [FIRST], KEYS[:1]) == ([], [FIRST])
    assert "has another identity: its weights differ: 1 blocks will be computed instead" in caplog.text


def test_another_version_is_another_identity(closed: ExitStack) -> None:
    gives, _ = sides(closed)
    with raw_socket(zmq.DEALER, gives.address) as client:
        client.send(encode(Ask(messages.VERSION - 1, 1, b"w" * 32, KEYS)))
        parts = PARTS | {"weights": (b"w" * 32).hex()}
        assert client.recv_multipart() == [encode(IdentityMismatch(1, parts))]


def test_a_closed_port_is_a_miss(closed: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "REPLY_TIMEOUT_S", 60.0)
    _, takes = sides(closed)
    assert takes.pull(f"127.0.0.1:{free_port()}", [FIRST], KEYS[:1]) == ([], [FIRST])
    assert takes.pull("no address", [FIRST], KEYS[:1]) == ([], [FIRST])


def test_a_silent_peer_is_a_miss(closed: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "REPLY_TIMEOUT_S", 0.1)
    _, takes = sides(closed)
    with raw_socket(zmq.ROUTER) as silent:
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        assert takes.pull(f"127.0.0.1:{port}", [FIRST], KEYS[:1]) == ([], [FIRST])


@pytest.mark.parametrize("limit", ["REPLY_TIMEOUT_S", "REQUEST_TIMEOUT_S"])
def test_a_peer_that_sends_only_foreign_replies_is_a_miss(
    closed: ExitStack, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(link, limit, 0.3)
    _, takes = sides(closed)
    peer = closed.enter_context(raw_socket(zmq.ROUTER))
    port = peer.bind_to_random_port("tcp://127.0.0.1")
    is_over = threading.Event()

    def send_stale_replies() -> None:
        sender, _ = peer.recv_multipart()
        while not is_over.wait(0.02):
            peer.send_multipart((sender, encode(BlockReply(99, 0, b"")), b""))

    thread = threading.Thread(target=send_stale_replies)
    thread.start()
    assert takes.pull(f"127.0.0.1:{port}", [FIRST], KEYS[:1]) == ([], [FIRST])
    is_over.set()
    thread.join()


@pytest.mark.parametrize("invalid_part", ["digest", "length", "place", "nonsense", "name"])
def test_an_invalid_reply_is_a_miss(
    closed: ExitStack, caplog: pytest.LogCaptureFixture, invalid_part: str
) -> None:
    _, takes = sides(closed)
    peer = closed.enter_context(raw_socket(zmq.ROUTER))
    port = peer.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        sender, head = peer.recv_multipart()
        assert b"ask" in head
        given = BlockReply(1, 7 if invalid_part == "place" else 0, b"d" * 32)
        frame = b"\xc1" if invalid_part == "nonsense" else encode(given)
        if invalid_part == "name":
            frame = encode(IdentityMismatch(1, {"\n12:00:00 supervisor INFO all is well": ""}))
        peer.send_multipart((sender, frame, b"0" * (1 if invalid_part == "length" else 2 * LAYER_BYTES)))

    thread = threading.Thread(target=answer)
    thread.start()
    assert takes.pull(f"127.0.0.1:{port}", [FIRST], KEYS[:1]) == ([], [FIRST])
    thread.join()
    assert "all is well" not in caplog.text


def test_an_invalid_message_between_requests_closes_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "WINDOW_BYTES", 1)
    with raw_socket(zmq.ROUTER) as peer, zmq.Context() as context:
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        with closing(Link(context, f"127.0.0.1:{port}", OWN, 2 * LAYER_BYTES)) as asks:
            blocks = asks.fetch(KEYS)

            def send_invalid_message() -> None:
                sender, _ = peer.recv_multipart()
                peer.send_multipart((sender, encode(BlocksMissing(1, [0]))))
                peer.send_multipart((sender, b"0" * (messages.MAX_HEAD_BYTES + 1)))

            thread = threading.Thread(target=send_invalid_message)
            thread.start()
            arrived = []
            with pytest.raises(PeerLost):
                arrived += blocks
            assert arrived in ([], [(0, None)])
            thread.join()


def test_only_peers_with_the_key_are_served(closed: ExitStack, tmp_path: Path) -> None:
    pairs = []
    for name in "kl":
        (tmp_path / name).write_bytes(name.encode() * 32)
        pairs.append(read_key(str(tmp_path / name), "--kv-peer-key", b"quintet peers"))
    gives = Side(0, key=pairs[0])
    takers = [Side(1, key=key) for key in pairs]
    for side in (gives, *takers):
        closed.callback(side.peers.close)
    gives.offer([0], KEYS[:1])
    pulled_by_key = [side.pull(gives.address, [FIRST], KEYS[:1]) for side in takers]
    assert pulled_by_key == [([FIRST], []), ([], [FIRST])]
    with raw_socket(zmq.DEALER, gives.address, key=None) as client:
        client.send(encode(Ask(messages.VERSION, 1, b"w" * 32, KEYS[:1])))
        assert takers[0].pull(gives.address, [FIRST], KEYS[:1]) == ([FIRST], [])
        assert not client.poll(50)


def test_an_invalid_request_is_ignored(closed: ExitStack) -> None:
    gives, takes = sides(closed)
    gives.offer([0], KEYS[:1])
    with raw_socket(zmq.DEALER, gives.address) as client:
        for frame in (b"", b"\xc1", encode(Ask(messages.VERSION, 1, b"w" * 32, [b"short"]))):
            client.send(frame)
        assert takes.pull(gives.address, [FIRST], KEYS[:1]) == ([FIRST], [])
        assert not client.poll(50)


def test_an_address_in_use_is_retried(closed: ExitStack) -> None:
    """A restarted executor must wait while its port is still in use."""
    gives, takes = sides(closed)
    late = PeerBackEnd(
        BlockBytes(gives.layers),
        HOST_BLOCKS,
        OwnIdentity(KEY, b"w" * 32, PARTS | {"weights": (b"w" * 32).hex()}),
        gives.address,
        8,
    )
    late.begin(lambda: None)
    closed.callback(late.close)
    late.order(KvTierRequests(0, "peer", [Store(pack_i32([3]), KEYS[:1])]))
    assert takes.pull(gives.address, [FIRST], KEYS[:1]) == ([], [FIRST]), (
        "the first process still has the address"
    )
    gives.peers.close()
    until_s = time.monotonic() + 30.0
    while takes.pull(gives.address, [FIRST], KEYS[:1]) != ([FIRST], []):
        takes.peers._backoff_until.clear()
        assert time.monotonic() < until_s


def test_an_address_of_another_machine_is_rejected(closed: ExitStack) -> None:
    gives, _ = sides(closed)
    with pytest.raises(ConfigError, match=r"--kv-peer-listen 192\.0\.2\.1:7"):
        PeerBackEnd(BlockBytes(gives.layers), HOST_BLOCKS, OWN, "192.0.2.1:7", 1)


def test_a_restarted_peer_is_used_again(closed: ExitStack) -> None:
    gives, takes = sides(closed)
    gives.offer([0], KEYS[:1])
    assert takes.pull(gives.address, [FIRST], KEYS[:1]) == ([FIRST], [])
    gives.peers.close()
    gives = Side(0, address=gives.address)
    closed.callback(gives.peers.close)
    gives.offer([1], KEYS[1:2])
    assert takes.pull(gives.address, [FIRST], KEYS[1:2]) == ([FIRST], [])
