"""Measure the tokenizer's memory during four concurrent `/tokenize` requests with long texts.

    python -m bench.tokenize_memory [--mib 20]

Starts `quintet serve` with the embedded model and sends the requests. Prints JSON with the resident memory of the processes in
MiB, for each kind of text: before the requests, at its maximum (the kernel's high-water mark), and after them.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import psutil

from bench.arguments import command_parser
from bench.overhead.server import Server, serve
from quintet.deploy.embedded import default_model_path

NUM_CLIENTS = 4
SETTLE_S = 2.0


def _random_text(letters: str) -> Callable[[int], str]:
    """Return a function from a number of bytes to a random text of these letters, with a period of 64 Ki letters."""
    drawn = "".join(Random(0).choices(letters, k=1 << 16))
    size = len(drawn.encode())
    return lambda num_bytes: drawn * (num_bytes // size)


KINDS: dict[str, Callable[[int], str]] = {
    "words": lambda num_bytes: ("the quick brown fox jumps over the lazy dog and " * (num_bytes // 48 + 1))[
        :num_bytes
    ],
    "digits": _random_text("0123456789 "),
    "letters": _random_text("abcdefghijklmnopqrstuvwxyz "),
    "one_word": _random_text("abcdefghijklmnopqrstuvwxyz"),
    "chinese": _random_text("".join(map(chr, range(0x4E00, 0x9FA5))) + 400 * "\u3002"),
    "emoji": _random_text("".join(map(chr, range(0x1F600, 0x1F640))) + " "),
}


def _measured(server: Server, text: str) -> dict[str, object]:
    processes = {
        role: process
        for process in psutil.Process(server.process.pid).children(recursive=True)
        for role in ("tokenizer", "frontend")
        if (process.cmdline() or [""])[0].startswith(f"quintet-{role}")
    }
    before = {role: process.memory_info().rss for role, process in processes.items()}
    for process in processes.values():
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # reset the high-water mark
    body = json.dumps({"prompt": text}, ensure_ascii=False).encode()
    began_s = time.monotonic()
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = list(clients.map(lambda _: _status(server, body), range(NUM_CLIENTS)))
    seconds = time.monotonic() - began_s
    time.sleep(SETTLE_S)
    return {
        "status": sorted(set(answers)),
        "seconds": round(seconds, 1),
        **{
            role: {
                "before": before[role] >> 20,
                "most": _peak_bytes(process.pid) >> 20,
                "after": process.memory_info().rss >> 20,
            }
            for role, process in processes.items()
        },
    }


def _status(server: Server, body: bytes) -> int:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=300)
    try:
        connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        while response.read(1 << 20):
            pass
        return response.status
    finally:
        connection.close()


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def main() -> None:
    """Measure and print JSON."""
    parser = command_parser(__doc__)
    parser.add_argument("--mib", type=int, default=20, help="size of each text (default: 20)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    with serve(default_model_path()) as server:
        figures = {kind: _measured(server, KINDS[kind](args.mib << 20)) for kind in args.kinds}
    print(json.dumps({"mib": args.mib, "at_once": NUM_CLIENTS, "by_kind": figures}, indent=1))


if __name__ == "__main__":
    main()
