"""Count the files and lines of Quintet that a streamed chat request crosses, in all processes.

    python -m bench.request_path [--list]

The server runs the embedded model on one CPU engine. After warm-up requests, each process records the functions that it enters
during a request. A function counts if every one of several equal requests enters it; so heartbeats and metrics do not count.
A file counts if one of its functions counts; lines are those of whole files, and of the counted functions alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.arguments import command_parser
from bench.counting.control import ROLES, TracedServer, serve_traced
from quintet.deploy.http_client.pool import ask

ROOT = Path(__file__).resolve().parents[1]
BODY = {
    "model": "quintet",
    "messages": [{"role": "user", "content": "Count to ten."}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 8,
    "ignore_eos": True,
}
FOLDERS = ("wire", "process", "frontend", "tokenizer_proc", "core", "executor", "detokenizer_proc", "deploy")
NUM_WARMUPS, NUM_REQUESTS = 3, 15
SETTLE_S = 0.1
"""Time before and after a request: processes receive the signal, and finish the request's last work."""

Function = tuple[str, int, int]
"""Path from the root, first and last line."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Functions entered by every request, by role."""

    functions: Mapping[str, frozenset[Function]]

    def files(self, *roles: str) -> dict[str, int]:
        """Return the lines of functions entered by some of these roles (default: all), by file."""
        lines: dict[str, set[int]] = {}
        for role in roles or self.functions:
            for path, first, last in self.functions[role]:
                lines.setdefault(path, set()).update(range(first, last + 1))
        return {path: len(found) for path, found in sorted(lines.items())}


def file_lines(path: str) -> int:
    """Return the number of lines of a file of the checkout."""
    return (ROOT / path).read_text().count("\n")


def measure() -> Crossing:
    """Serve the embedded model, send requests, and return what each of them crosses."""
    with serve_traced("functions", None, ("--served-model-name", "quintet"), ROOT) as server:
        for _ in range(NUM_WARMUPS):
            _send(server)
        rounds = [_functions_of_a_request(server) for _ in range(NUM_REQUESTS)]
    return Crossing({role: frozenset.intersection(*(each[role] for each in rounds)) for role in ROLES})


def _functions_of_a_request(server: TracedServer) -> dict[str, frozenset[Function]]:
    with server.trace() as results:
        time.sleep(SETTLE_S)
        _send(server)
        time.sleep(SETTLE_S)
    return {role: frozenset(_ours(table)) for role, table in results.items()}


def _send(server: TracedServer) -> None:
    response = ask(server.target, "POST", "/v1/chat/completions", BODY)
    if response.status != 200 or not response.body.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"the server answered {response.status}: {response.body[:500]!r}")


def _ours(table: str) -> list[Function]:
    functions = []
    for row in table.splitlines():
        name, first, last = row.split("\t")
        path = Path(name).resolve()
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS:
            functions.append((str(path.relative_to(ROOT)), int(first), int(last)))
    return functions


def main() -> None:
    """Measure and print."""
    parser = command_parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print the files of each process")
    options = parser.parse_args()
    crossing = measure()
    print(f"{'process':<12}{'files':>7}{'lines':>8}{'in functions':>14}")
    for role in (*ROLES, "all"):
        files = crossing.files(*(() if role == "all" else (role,)))
        print(f"{role:<12}{len(files):>7}{sum(map(file_lines, files)):>8}{sum(files.values()):>14}")
    for role in ROLES if options.list else ():
        print(f"\n{role}: lines of the file, lines in functions entered")
        for path, entered in crossing.files(role).items():
            print(f"{file_lines(path):>7}{entered:>7}  {path}")


if __name__ == "__main__":
    main()
