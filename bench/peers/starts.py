"""Measure the time from process start to first token with a GGUF file in the page cache: Quintet and llama.cpp, alternating.

    python -m bench.peers.starts FILE.gguf [--repetitions 3] [--save RESULT.json]

Quintet is `quintet serve`, which gets a request over HTTP when it is ready. llama.cpp is a driver process
(`bench.peers.drivers.llamacpp`) that loads the file and generates, without a server and a tokenizer. Both get the same prompt.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from statistics import median

from bench.arguments import command_parser
from bench.peers.engines.driver_process import start_driver
from bench.peers.engines.interface import Home
from bench.peers.engines.llamacpp import ENVIRONMENT
from bench.peers.jobs import Job
from bench.startup import PROMPT, read_into_page_cache, start_once

MAX_LEN = 256


def llama_cpp_s(home: Home, model: Path) -> float:
    """Return llama.cpp's time to the first token, in seconds."""
    began_s = time.perf_counter()
    arguments = [str(model), "--threads", str(home.threads), "--max-len", str(MAX_LEN), "--kv-bytes", "0"]
    running = start_driver(
        home.python(ENVIRONMENT), "bench.peers.drivers.llamacpp", arguments, {}, home.log("llama.cpp")
    )
    try:
        running.run(Job([PROMPT], [1], 1, MAX_LEN))
        return time.perf_counter() - began_s
    finally:
        running.stop()


def quintet_s(home: Home, model: Path) -> float:
    """Return Quintet's time to the first token, in seconds."""
    flags = ["--threads", str(home.threads), "--max-model-len", str(MAX_LEN)]
    return start_once(str(model), flags).first_token_s


def main() -> None:
    """Start both engines alternately and print the medians."""
    parser = command_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "quintet-peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the times as JSON")
    arguments = parser.parse_args()
    home = Home(arguments.home, arguments.threads, MAX_LEN, 0)
    read_into_page_cache(arguments.model)
    seconds: dict[str, list[float]] = {"Quintet": [], "llama.cpp": []}
    for _ in range(arguments.repetitions):
        for name, start in (("Quintet", quintet_s), ("llama.cpp", llama_cpp_s)):
            seconds[name].append(round(start(home, arguments.model), 2))
            print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    ours, theirs = (median(each) for each in seconds.values())
    gigabytes = arguments.model.stat().st_size / 1e9
    print(
        f"{gigabytes:.2f} GB, medians: Quintet {ours:.2f} s, llama.cpp {theirs:.2f} s, ratio {ours / theirs:.2f}"
    )
    if arguments.save:
        record = {
            "command": "python -m bench.peers.starts",
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.processor() or platform.machine(),
            "model": arguments.model.name,
            "bytes": arguments.model.stat().st_size,
            "threads": arguments.threads,
            "seconds": seconds,
        }
        arguments.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
