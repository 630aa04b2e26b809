"""What eight clients that hardly read cost the others: the time between tokens of 64 streams, with them and without.

    python -m bench.chaos.slow_readers [--pairs 3] [--out FILE]

One server with the mock executor; the two loads take turns on it. A slow reader asks for a long answer with
log-probabilities, has a receive buffer of a few kilobytes and takes 200 bytes ten times a second; when the server ends
its connection, it asks again. The frontend's memory is looked at as well.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import psutil

from bench.chaos.streams import WORDS
from bench.overhead.run import Machine, machine
from bench.overhead.server import Server, serve
from quintet.deploy.load_client.load import Load, run_load
from quintet.deploy.load_client.report import summarise

STREAMS, SLOW_READERS, OUTPUT_LEN = 64, 8, 800
FLAGS = ["--executor", "mock", "--step-ms", "10", "--max-num-seqs", "128"]


class Side(msgspec.Struct):
    """One run of the 64 streams."""

    inter_token_p50_ms: float
    inter_token_p99_ms: float
    inter_token_max_ms: float
    frontend_bytes: int
    """Resident memory of the frontend at the end."""
    num_cut_off: int
    """Slow readers whose connection the server ended."""


class Report(msgspec.Struct):
    """The file."""

    date: str
    machine: Machine
    streams: int
    slow_readers: int
    alone: list[Side]
    beside: list[Side]


class SlowReader(threading.Thread):
    """One client that hardly reads."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._address = (server.target.host, server.target.port)
        self.stopping = threading.Event()
        self.num_cut_off = 0

    def run(self) -> None:
        """Ask and hardly read, again and again."""
        asked = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": 5}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        while not self.stopping.is_set():
            with contextlib.suppress(OSError), socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
                client.connect(self._address)
                client.sendall(head.encode() + body)
                client.settimeout(1.0)
                while not self.stopping.wait(0.1):
                    with contextlib.suppress(TimeoutError):  # the system offers so small a window rarely
                        if not client.recv(200):
                            break
            self.num_cut_off += not self.stopping.is_set()


@contextlib.contextmanager
def slow_readers(server: Server, count: int) -> Iterator[list[SlowReader]]:
    """Let so many slow readers be there meanwhile."""
    readers = [SlowReader(server) for _ in range(count)]
    for reader in readers:
        reader.start()
    try:
        yield readers
    finally:
        for reader in readers:
            reader.stopping.set()
        for reader in readers:
            reader.join()


def measure(server: Server, num_slow: int) -> Side:
    """Run the streams once, beside so many slow readers."""
    asked = {"max_tokens": OUTPUT_LEN, "ignore_eos": True, "stream": True}
    bodies = [
        msgspec.json.encode({"prompt": " ".join(WORDS), "seed": seed, **asked}) for seed in range(STREAMS)
    ]
    with slow_readers(server, num_slow) as readers:
        summary = summarise(run_load(Load(server.target, "/v1/completions", bodies, STREAMS)))
        num_bytes = _frontend_bytes(server)
    assert summary.num_completed == STREAMS, summary.failures
    times = summary.inter_token_ms
    assert times is not None
    return Side(times.p50, times.p99, times.max, num_bytes, sum(reader.num_cut_off for reader in readers))


def _frontend_bytes(server: Server) -> int:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sum(c.memory_info().rss for c in children if c.cmdline()[0].startswith("quintet-frontend"))


def main() -> None:
    """Run the pairs, print the medians, write the raw results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = Report(date, machine(), STREAMS, SLOW_READERS, [], [])
    with serve(None, FLAGS) as server:
        measure(server, 0)  # warm-up: not kept
        for _ in range(arguments.pairs):
            report.alone.append(measure(server, 0))
            report.beside.append(measure(server, SLOW_READERS))
            print(report.alone[-1], report.beside[-1], sep="\n", flush=True)
    alone, beside = (median(s.inter_token_p99_ms for s in sides) for sides in (report.alone, report.beside))
    print(
        f"inter-token p99: {alone:.2f} ms alone, {beside:.2f} ms beside: {100 * (beside / alone - 1):+.1f} %"
    )
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
