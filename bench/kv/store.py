"""Value of a shared KV store: the first token of long prompts, computed by one server, and fetched by another.

    python -m bench.kv.store --shape S [--store URL] [--tokens 4032] [--prompts 3] [--model FOLDER] [--save FILE] [-- FLAGS]

Two servers of one machine share a store: shared memory, unless ``--store`` says otherwise. The first one computes so many
prompts, one after the other, and is ended; then the second one gets the same prompts. Every answer must be the same, byte for
byte. The model is of the real shape, its weights are random, made in ``--model`` unless it is there.
"""

from __future__ import annotations

import datetime
import random
import tempfile
import time
from pathlib import Path

import msgspec

from bench.arguments import command_parser
from bench.kv.disk import NUM_OUTPUTS, Asked, ask, compare
from bench.overhead.run import Machine, _commit, machine
from bench.overhead.server import serve
from bench.peers.models import SHAPES, make_model


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    shape: str
    store: str
    tokens: int
    flags: list[str]
    computed: list[Asked]
    fetched: list[Asked]


def measure(model: Path, prompts: list[list[int]], flags: list[str]) -> list[Asked]:
    """Ask one server all prompts, and end it."""
    with serve(model, flags) as server:
        ask(server.url, prompts[0][:64][::-1])  # the first request of a server pays for what is loaded late
        found = [ask(server.url, prompt) for prompt in prompts]
        time.sleep(2.0)  # the last answer's runs are kept
        server.process.kill()
    return found


def main() -> None:
    """Measure, print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--store", metavar="URL", help="as of --kv-store; shared memory, if nothing is said")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="where the model is, or is made")
    parser.add_argument("--tokens", type=int, default=4032, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of serve, after --")
    args = parser.parse_args()
    rng = random.Random(1)
    prompts = [[rng.randrange(300, 30_000) for _ in range(args.tokens)] for _ in range(args.prompts)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="quintet-bench-") as shared,
    ):
        model = make_model(args.model or Path(scratch) / "model", SHAPES[args.shape])
        store = args.store or f"file://{shared}"
        flags = ["--max-model-len", str(args.tokens + NUM_OUTPUTS + 16), "--kv-store", store, *args.flags]
        computed = measure(model, prompts, flags)
        fetched = measure(model, prompts, flags)
    compare(("computed", computed), ("fetched", fetched))
    if args.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        where = args.store or "file:///dev/shm/…"
        report = Report(
            date, _commit(), machine(), args.shape, where, args.tokens, args.flags, computed, fetched
        )
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
