"""Compare transfers between two processes over loopback: gloo's send and recv, and the sockets of
`quintet.executor.distributed.hosts`.

    python -m bench.distributed.host_transfer [--repetitions 200] [--save FILE]

Both send hidden states or logits from one process to another and wait for a reply. gloo sends plain text; the sockets encrypt
with CURVE. The shared memory and threads of `quintet.executor.distributed.hosts` are not included.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed
import zmq

from bench.overhead.run import Machine, _commit, machine
from quintet.executor.kv_transfer.peers.keys import Context, PeerKey

SIZES = (2 << 10, 128 << 10, 4 << 20, 9 << 20)
"""Sizes in bytes: hidden states ``[num_tokens, 1024]`` of 1, 64 and 2048 tokens in bf16, and logits ``[32, 150_000]``."""
WARMUP = 20


class Figure(msgspec.Struct, frozen=True):
    """Median round-trip time of one size."""

    way: str
    size_bytes: int
    ms: float


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    repetitions: int
    figures: list[Figure]


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def median_ms(step: Callable[[], None], repetitions: int) -> float:
    """Return the median time of a step in milliseconds."""
    times = []
    for _ in range(WARMUP + repetitions):
        begin_s = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin_s) * 1e3)
    return median(times[WARMUP:])


def gloo(rank: int, port: int, repetitions: int, results: multiprocessing.Queue[tuple[int, float]]) -> None:
    """Measure round trips by gloo. Rank 0 sends states and receives a reply; rank 1 does the opposite."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    reply = torch.zeros(1, dtype=torch.uint8)
    for size in SIZES:
        states = torch.zeros(size, dtype=torch.uint8)

        def send_first(states: torch.Tensor = states) -> None:
            torch.distributed.send(states, 1)
            torch.distributed.recv(reply, 1)

        def receive_first(states: torch.Tensor = states) -> None:
            torch.distributed.recv(states, 0)
            torch.distributed.send(reply, 0)

        ms = median_ms(receive_first if rank else send_first, repetitions)
        if not rank:
            results.put((size, ms))


def encrypted(
    rank: int, port: int, repetitions: int, results: multiprocessing.Queue[tuple[int, float]]
) -> None:
    """Measure round trips by the encrypted sockets of hub and member; ranks as in `gloo`."""
    secret = b"A" * 40
    key = PeerKey(zmq.curve_public(secret), secret)
    peer = Context().socket(zmq.ROUTER if rank else zmq.DEALER)
    key.protect(peer, listens=bool(rank))
    (peer.bind if rank else peer.connect)(f"tcp://127.0.0.1:{port}")
    for size in SIZES:
        states, buffer = bytearray(size), bytearray(size)

        def send_first(states: bytearray = states) -> None:
            peer.send_multipart([b"states", b"", memoryview(states)], copy=False)
            peer.recv_multipart(copy=False)

        def receive_first(buffer: bytearray = buffer) -> None:
            sender, _, _, frame = peer.recv_multipart(copy=False)
            buffer[:] = frame.buffer
            peer.send_multipart([sender, b"done"], copy=False)

        ms = median_ms(receive_first if rank else send_first, repetitions)
        if not rank:
            results.put((size, ms))
    peer.close(linger=-1 if rank else 0)


TRANSPORTS = {"gloo": gloo, "link": encrypted}


def main() -> None:
    """Measure both transports, print the results, and save them with --save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn = multiprocessing.get_context("spawn")
    figures = []
    for way, work in TRANSPORTS.items():
        results, port = spawn.Queue(), free_port()
        peers = [
            spawn.Process(target=work, args=(rank, port, arguments.repetitions, results)) for rank in (0, 1)
        ]
        for peer in peers:
            peer.start()
        for _ in SIZES:
            size, ms = results.get(timeout=120)
            figures.append(Figure(way, size, ms))
            print(f"{way:>5}  {size:>10,} bytes  {ms:8.3f} ms", flush=True)
        for peer in peers:
            peer.join()
    if arguments.save is not None:
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        report = Report(today, _commit(), machine(), arguments.repetitions, figures)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
