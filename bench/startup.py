"""Measure the time from `quintet serve MODEL` to the first token, by process, and the memory of all processes.

    python -m bench.startup MODEL                      three starts; medians
    python -m bench.startup MODEL --repetitions 5 -- --packed-cache DIR
                                                       flags of `quintet serve` after --

The clock starts with the supervisor's process. The table has, for each process: its start, the time until it is ready, its CPU
time, and its PSS after the first token. The import time of its modules is measured in a new interpreter. The executor's log line
has the load time of the weights. Model files are read into the page cache before, so that the disk is not measured.
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
"""Modules to import for roles with slow imports besides the main module."""
PROMPT = list(range(300, 316))


@dataclass(frozen=True, slots=True)
class Part:
    """A process of one start. Times are in seconds."""

    start_s: float
    """Start of the process, relative to the supervisor's."""
    cpu_s: float
    """CPU time until after the first token, all threads."""
    pss_bytes: int


@dataclass(frozen=True, slots=True)
class Start:
    """Result of one start. Times are in seconds since the start of the supervisor's process."""

    ready_s: float
    first_token_s: float
    role_ready_s: dict[str, float]
    parts: dict[str, Part]
    executor_facts: str


def start_once(model: str, flags: Sequence[str]) -> Start:
    """Start a server, request one token, measure the processes, end the server."""
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
        role_ready_s: dict[str, float] = {}
        executor_facts = ""
        url = None
        for line in process.stdout:
            role = _ROLE_READY.match(line)
            if role:
                role_ready_s[role[1]] = time.perf_counter() - began_s
                executor_facts = role[3] if role[1] == "executor" else executor_facts
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
        return Start(ready_s, first_token_s, role_ready_s, _parts(process.pid), executor_facts)
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
    """Return the time to start a new interpreter and import ``modules``, in seconds."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", f"import {modules}"], check=True)
    return time.perf_counter() - began_s


def report(starts: Sequence[Start], imports: dict[str, float]) -> str:
    """Return the medians as a table."""

    def median_of(values: Sequence[float]) -> float:
        return median(values)

    lines = [f"{'process':<14}{'start':>8}{'ready':>8}{'imports':>9}{'CPU':>8}{'PSS':>10}   seconds, MB"]
    for name in sorted(starts[0].parts, key=lambda name: starts[0].parts[name].start_s):
        parts = [start.parts[name] for start in starts if name in start.parts]
        ready = [start.role_ready_s[name] for start in starts if name in start.role_ready_s]
        lines.append(
            f"{name:<14}{median_of([part.start_s for part in parts]):>8.2f}"
            + (f"{median_of(ready):>8.2f}" if ready else f"{'':>8}")
            + (f"{imports[name]:>9.2f}" if name in imports else f"{'':>9}")
            + f"{median_of([part.cpu_s for part in parts]):>8.2f}"
            + f"{median_of([part.pss_bytes for part in parts]) / 1e6:>10.1f}"
        )
    total_pss = [sum(part.pss_bytes for part in start.parts.values()) for start in starts]
    first_tokens = ", ".join(f"{start.first_token_s:.2f}" for start in starts)
    lines += [
        "",
        f"executor: {starts[-1].executor_facts}",
        f"all ready after {median_of([start.ready_s for start in starts]):.2f} s, first token after "
        f"{median_of([start.first_token_s for start in starts]):.2f} s ({first_tokens}); "
        f"{median_of(total_pss) / 1e9:.2f} GB in all processes",
    ]
    return "\n".join(lines)


def read_into_page_cache(model: Path) -> None:
    """Read a file, or all files of a folder."""
    for file in sorted(model.iterdir()) if model.is_dir() else (model,):
        if file.is_file():
            with file.open("rb") as opened:
                while opened.read(16 << 20):
                    pass


def main() -> None:
    """Start the server ``--repetitions`` times and print the table."""
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
