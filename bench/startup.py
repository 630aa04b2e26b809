"""Time from `quintet serve MODEL` to the first token, by part, and the memory of all processes then.

    python -m bench.startup MODEL                      three starts; medians
    python -m bench.startup MODEL --repetitions 5 -- --packed-cache DIR
                                                       flags of `quintet serve` after --

The clock starts when the supervisor's process is made. For each child: when it was made, how long until it said that it is
ready, how much processor time that took, what importing its modules takes by itself (a fresh interpreter that does only
that), and its PSS after the first token. The executor's own words say how long its weights took. Model files are read into
the page cache before: the disk is not measured.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.peers.engines import processes
from quintet.deploy.http_client.connection import Target
from quintet.deploy.supervisor.spawn import MODULES
from quintet.deploy.tools.load_client.load import Load, run_load
from quintet.deploy.tools.load_client.workload import Item, RequestShape

_READY = re.compile(r"Quintet is ready: (http://\S+)")
_ROLE_READY = re.compile(r"^  ([a-z]+)(?: ×\d+)? +(\d+\.\d) s  (.*)$")
_TITLE = re.compile(r"quintet-([a-z]+)")
_WORKER_IMPORTS = {"executor": "quintet.executor.main, quintet.executor.worker"}
"""Slow imports of a role besides its main module."""
PROMPT = list(range(300, 316))


@dataclass(frozen=True, slots=True)
class Part:
    """One process of one start. Times in seconds."""

    made_s: float
    """After the start of the clock; 0 for the supervisor."""
    cpu_s: float
    """Processor time until after the first token, all threads."""
    pss_bytes: int


@dataclass(frozen=True, slots=True)
class Start:
    """One start. Times in seconds from the making of the supervisor's process."""

    ready_s: float
    first_token_s: float
    role_ready_s: dict[str, float]
    parts: dict[str, Part]
    executor_words: str


def start_once(model: str, flags: Sequence[str]) -> Start:
    """Start a server, ask for one token, weigh the processes, end the server."""
    command = [sys.executable, "-m", "quintet.deploy.cli.main", "serve", model, "--port", "0"]
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--served-model-name", "startup", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready_s_by_role: dict[str, float] = {}
        executor_words = ""
        url = None
        for line in process.stdout:
            role = _ROLE_READY.match(line)
            if role:
                ready_s_by_role[role[1]] = time.perf_counter() - began_s
                executor_words = role[3] if role[1] == "executor" else executor_words
            ready = _READY.search(line)
            if ready:
                url = ready[1]
                break
        if url is None:
            raise RuntimeError(f"the server ended with status {process.wait()} before it was ready")
        ready_s = time.perf_counter() - began_s
        shape = RequestShape("/v1/completions", "startup", 1, ignore_eos=True)
        outcome = run_load(Load(Target.parse(url), shape.endpoint, [shape.body(Item(PROMPT))], 1)).outcomes[0]
        first_token_s = time.perf_counter() - began_s
        if outcome.failure is not None:
            raise RuntimeError(f"the first request failed with {outcome.failure}: {outcome.message}")
        return Start(ready_s, first_token_s, ready_s_by_role, _parts(process.pid), executor_words)
    finally:
        processes.end(process)
        if process.stdout is not None:
            process.stdout.close()


def _parts(pid: int) -> dict[str, Part]:
    parts = {}
    members = processes.family(pid)
    began = members[0].create_time()
    for process in members:
        title = _TITLE.match((process.cmdline() or [""])[0])
        times = process.cpu_times()
        name = title[1] if title else process.name()
        parts[name] = Part(
            process.create_time() - began,
            times.user + times.system,
            processes.own_pss_bytes(process.pid),
        )
    return parts


def import_seconds(modules: str) -> float:
    """Return how long a fresh interpreter takes to start and import ``modules``."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", f"import {modules}"], check=True)
    return time.perf_counter() - began_s


def report(starts: Sequence[Start], imports: dict[str, float]) -> str:
    """Lay out the medians."""

    def mid(values: Sequence[float]) -> float:
        return median(values)

    lines = [f"{'process':<14}{'made':>8}{'ready':>8}{'imports':>9}{'CPU':>8}{'PSS':>10}   seconds, MB"]
    for name in sorted(starts[0].parts, key=lambda name: starts[0].parts[name].made_s):
        parts = [start.parts[name] for start in starts if name in start.parts]
        ready = [start.role_ready_s[name] for start in starts if name in start.role_ready_s]
        lines.append(
            f"{name:<14}{mid([part.made_s for part in parts]):>8.2f}"
            + (f"{mid(ready):>8.2f}" if ready else f"{'':>8}")
            + (f"{imports[name]:>9.2f}" if name in imports else f"{'':>9}")
            + f"{mid([part.cpu_s for part in parts]):>8.2f}"
            + f"{mid([part.pss_bytes for part in parts]) / 1e6:>10.1f}"
        )
    total_pss = [sum(part.pss_bytes for part in start.parts.values()) for start in starts]
    lines += [
        "",
        f"executor: {starts[-1].executor_words}",
        f"all ready after {mid([start.ready_s for start in starts]):.2f} s, first token after "
        f"{mid([start.first_token_s for start in starts]):.2f} s (of {', '.join(f'{s.first_token_s:.2f}' for s in starts)}); "
        f"{mid(total_pss) / 1e9:.2f} GB in all processes",
    ]
    return "\n".join(lines)


def read_into_page_cache(model: Path) -> None:
    """Read a file, or those of a folder."""
    for file in sorted(model.iterdir()) if model.is_dir() else (model,):
        if file.is_file():
            with file.open("rb") as opened:
                while opened.read(16 << 20):
                    pass


def main() -> None:
    """Start as often as asked and print the table."""
    parser = argparse.ArgumentParser(
        usage="python -m bench.startup MODEL [--repetitions N] [-- FLAG ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="local folder, or a GGUF file")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="(default: %(default)s)")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments, flags = parser.parse_args(given[:end]), given[end + 1 :]
    read_into_page_cache(Path(arguments.model))
    starts = [start_once(arguments.model, flags) for _ in range(arguments.repetitions)]
    imports = {}
    for role, module in MODULES.items():
        modules = _WORKER_IMPORTS.get(str(role), module)
        imports[str(role)] = median(import_seconds(modules) for _ in range(arguments.repetitions))
    print(report(starts, imports))


if __name__ == "__main__":
    main()
