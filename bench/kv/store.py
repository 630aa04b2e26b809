"""Measure time to first token of long prompts: computed by one server, and fetched from a shared KV store by another.

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
from bench.kv.disk import NUM_OUTPUTS, PromptResult, compare, send_prompt
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
    computed: list[PromptResult]
    fetched: list[PromptResult]


def measure(model: Path, prompts: list[list[int]], flags: list[str]) -> list[PromptResult]:
    """Send all prompts to one server, then kill it."""
    with serve(model, flags) as server:
        send_prompt(server.url, prompts[0][:64][::-1])  # warm-up
        results = [send_prompt(server.url, prompt) for prompt in prompts]
        time.sleep(2.0)  # wait for the writes of the last chunks
        server.process.kill()
    return results


def main() -> None:
    """Measure, print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--store", metavar="URL", help="as of --kv-store (default: shared memory)")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="folder of the model; created if missing"
    )
    parser.add_argument("--tokens", type=int, default=4032, help="length of a prompt")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
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
        store_name = args.store or "file:///dev/shm/…"
        report = Report(
            date, _commit(), machine(), args.shape, store_name, args.tokens, args.flags, computed, fetched
        )
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
