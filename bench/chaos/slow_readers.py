"""Effect of eight slow clients on the inter-token latency of 64 other streams.

    python -m bench.chaos.slow_readers [--pairs 4] [--out FILE]

The server has the mock executor. Besides the 64 streams, eight requests for long responses with log-probabilities are always
active. In alternate runs, their clients read at full speed, or 200 bytes ten times a second with a receive buffer of a few
kilobytes. When the server closes such a connection, the client sends its request again. The frontend's memory is measured too.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import psutil

from bench.arguments import command_parser
from bench.chaos.streams import WORDS
from bench.overhead.run import Machine, machine
from bench.overhead.server import Server, serve
from quintet.deploy.tools.load_client.load import Load, run_load
from quintet.deploy.tools.load_client.report import summarise

STREAMS, READERS, OUTPUT_LEN = 64, 8, 600
FLAGS = ["--executor", "mock", "--step-ms", "10", "--max-num-seqs", "128"]


class Figures(msgspec.Struct):
    """Results of one run of the 64 streams."""

    inter_token_p50_ms: float
    inter_token_p99_ms: float
    inter_token_max_ms: float
    frontend_bytes: int
    """Resident memory of the frontend at the end."""
    num_cut_off: int
    """Connections that the server closed."""


class Report(msgspec.Struct):
    """Contents of the result file."""

    date: str
    machine: Machine
    streams: int
    readers: int
    quick: list[Figures]
    slow: list[Figures]


class Readers(multiprocessing.Process):
    """The eight clients, in a separate process so that they do not delay the measured streams."""

    def __init__(self, server: Server, is_slow: bool) -> None:
        super().__init__(daemon=True)
        self._address = (server.target.host, server.target.port)
        self._is_slow = is_slow
        self.stopping = multiprocessing.Event()
        self.cut_off = multiprocessing.Value("i", 0)

    def run(self) -> None:
        """Run all clients until `stopping` is set."""
        threads = [threading.Thread(target=self._run_client) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run_client(self) -> None:
        """Send the request and read the response, repeatedly."""
        fields = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True, "logprobs": 10}
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        while not self.stopping.is_set():
            with contextlib.suppress(OSError), socket.socket() as client:
                if self._is_slow:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
                client.connect(self._address)
                client.sendall(head.encode() + body)
                client.settimeout(1.0)
                self._read(client)
            if not self.stopping.is_set():
                with self.cut_off.get_lock():
                    self.cut_off.value += 1

    def _read(self, client: socket.socket) -> None:
        size, pause_s = (200, 0.1) if self._is_slow else (1 << 16, 0.0)
        while not self.stopping.wait(pause_s):
            with contextlib.suppress(TimeoutError):  # the kernel rarely advertises so small a window
                if not client.recv(size):
                    return


@contextlib.contextmanager
def readers(server: Server, *, are_slow: bool) -> Iterator[Readers]:
    """Run the eight clients during the block."""
    clients = Readers(server, are_slow)
    clients.start()
    try:
        yield clients
    finally:
        clients.stopping.set()
        clients.join()


def measure(server: Server, *, are_slow: bool) -> Figures:
    """Run the streams once, with slow or fast clients beside them."""
    fields = {"max_tokens": OUTPUT_LEN, "ignore_eos": True, "stream": True}
    bodies = [
        msgspec.json.encode({"prompt": " ".join(WORDS), "seed": seed, **fields}) for seed in range(STREAMS)
    ]
    with readers(server, are_slow=are_slow) as clients:
        summary = summarise(run_load(Load(server.target, "/v1/completions", bodies, STREAMS)))
        num_bytes = _frontend_bytes(server)
    assert summary.num_completed == STREAMS, summary.failures
    times = summary.inter_token_ms
    assert times is not None
    return Figures(times.p50, times.p99, times.max, num_bytes, clients.cut_off.value)


def _frontend_bytes(server: Server) -> int:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sum(c.memory_info().rss for c in children if c.cmdline()[0].startswith("quintet-frontend"))


def main() -> None:
    """Run the pairs, print the medians, write the raw results."""
    parser = command_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = Report(date, machine(), STREAMS, READERS, [], [])
    with serve(None, FLAGS) as server:
        measure(server, are_slow=False)  # warm-up: not kept
        for _ in range(arguments.pairs):
            report.quick.append(measure(server, are_slow=False))
            report.slow.append(measure(server, are_slow=True))
            print(report.quick[-1], report.slow[-1], sep="\n", flush=True)
    quick, slow = (median(s.inter_token_p99_ms for s in runs) for runs in (report.quick, report.slow))
    print(
        f"inter-token p99: {quick:.2f} ms with fast clients, {slow:.2f} ms with slow ones: {100 * (slow / quick - 1):+.1f} %"
    )
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
