"""Transfer of bytes to another host over loopback: gloo's point-to-point, and the sockets of
`quintet.executor.distributed.hosts`.

    python -m bench.distributed.host_transfer [--repetitions 200] [--save FILE]

Both send hidden states, or logits, from one process to another and wait for a reply. gloo sends plain bytes, the sockets
encrypt (CURVE). Shared memory and threads of a link are not included.
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
"""Bytes: hidden states of 1, 64 and 2048 tokens of 1024 numbers in bf16, and logits of 32 rows of 150,000."""
WARMUP = 20


class Figure(msgspec.Struct, frozen=True):
    """The median of the time until the word came back."""

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


def times_of(step: Callable[[], None], repetitions: int) -> float:
    """Return the median in ms."""
    times = []
    for _ in range(WARMUP + repetitions):
        begun = time.perf_counter()
        step()
        times.append((time.perf_counter() - begun) * 1e3)
    return median(times[WARMUP:])


def gloo(rank: int, port: int, repetitions: int, answers: multiprocessing.Queue[tuple[int, float]]) -> None:
    """Send and hear a word back; or, as rank 1, the other way round."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    word = torch.zeros(1, dtype=torch.uint8)
    for size in SIZES:
        states = torch.zeros(size, dtype=torch.uint8)

        def there(states: torch.Tensor = states) -> None:
            torch.distributed.send(states, 1)
            torch.distributed.recv(word, 1)

        def here(states: torch.Tensor = states) -> None:
            torch.distributed.recv(states, 0)
            torch.distributed.send(word, 0)

        ms = times_of(here if rank else there, repetitions)
        if not rank:
            answers.put((size, ms))


def sealed(rank: int, port: int, repetitions: int, answers: multiprocessing.Queue[tuple[int, float]]) -> None:
    """Likewise, by the sockets of hub and member."""
    secret = b"A" * 40
    key = PeerKey(zmq.curve_public(secret), secret)
    end = Context().socket(zmq.ROUTER if rank else zmq.DEALER)
    key.protect(end, listens=bool(rank))
    (end.bind if rank else end.connect)(f"tcp://127.0.0.1:{port}")
    for size in SIZES:
        states, place = bytearray(size), bytearray(size)

        def there(states: bytearray = states) -> None:
            end.send_multipart([b"states", b"", memoryview(states)], copy=False)
            end.recv_multipart(copy=False)

        def here(place: bytearray = place) -> None:
            sender, _, _, frame = end.recv_multipart(copy=False)
            place[:] = frame.buffer
            end.send_multipart([sender, b"done"], copy=False)

        ms = times_of(here if rank else there, repetitions)
        if not rank:
            answers.put((size, ms))
    end.close(linger=-1 if rank else 0)


WAYS = {"gloo": gloo, "link": sealed}


def main() -> None:
    """Measure both, print them, and keep them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn = multiprocessing.get_context("spawn")
    figures = []
    for way, work in WAYS.items():
        answers, port = spawn.Queue(), free_port()
        ends = [
            spawn.Process(target=work, args=(rank, port, arguments.repetitions, answers)) for rank in (0, 1)
        ]
        for end in ends:
            end.start()
        for _ in SIZES:
            size, ms = answers.get(timeout=120)
            figures.append(Figure(way, size, ms))
            print(f"{way:>5}  {size:>10,} bytes  {ms:8.3f} ms", flush=True)
        for end in ends:
            end.join()
    if arguments.save is not None:
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        report = Report(today, _commit(), machine(), arguments.repetitions, figures)
        arguments.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
