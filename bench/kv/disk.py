"""Value of KV on disk: the first token of long prompts, computed, and read by a restarted server.

    python -m bench.kv.disk --shape S [--tokens 4032] [--prompts 3] [--model FOLDER] [--save FILE] [-- FLAGS OF SERVE]

A server with ``--kv-disk`` computes so many prompts, one after the other; it is killed with all its processes; another one, over
the same files, gets the same prompts. Before that the system drops the files' pages, so that they are read from the
disk. Every answer must be the same, byte for byte. The model is of the real shape, its weights are random, made in ``--model``
unless it is there.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

import msgspec

from bench.arguments import command_parser
from bench.overhead.run import Machine, _commit, machine
from bench.overhead.server import serve
from bench.peers.models import SHAPES, make_model

NUM_OUTPUTS = 16


class Asked(msgspec.Struct, frozen=True):
    """One prompt's answer."""

    first_token_s: float
    cached_tokens: int
    text: str


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    shape: str
    tokens: int
    flags: list[str]
    computed: list[Asked]
    read: list[Asked]
    disk_bytes: int


def ask(url: str, prompt: list[int]) -> Asked:
    """Send a prompt, and read its stream."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_OUTPUTS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun_s, first_s, text, num_cached = time.perf_counter(), 0.0, "", 0
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"]:
                first_s = first_s or time.perf_counter() - begun_s
                text += event["choices"][0]["text"]
            if event.get("usage"):
                num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Asked(first_s, num_cached, text)


def compare(*both: tuple[str, list[Asked]]) -> None:
    """Print how soon both began to answer, the second against the first, and whether they said the same."""
    for what, found in both:
        seconds = [each.first_token_s for each in found]
        cached = [each.cached_tokens for each in found]
        listed = ", ".join(f"{each:.3f}" for each in seconds)
        print(f"{what:<9} first token {median(seconds):.3f} s ({listed}), cached tokens {cached}")
    one, other = (found for _, found in both)
    gain = median(each.first_token_s for each in one) / median(each.first_token_s for each in other)
    same = [each.text == again.text for each, again in zip(one, other, strict=True)]
    print(f"{gain:.1f} x sooner; answers the same: {all(same)}")


def measure(model: Path, prompts: list[list[int]], folder: Path, flags: list[str]) -> list[Asked]:
    """Ask one server all prompts, and kill it."""
    with serve(model, [*flags, "--kv-disk", str(folder)]) as server:
        ask(server.url, prompts[0][:64][::-1])  # the first request of a server pays for what is loaded late
        found = [ask(server.url, prompt) for prompt in prompts]
        time.sleep(2.0)  # the last answer's blocks are written
        server.process.kill()
    return found


def forget_pages(folder: Path) -> int:
    """Have the system write the files and forget their pages; return their bytes."""
    size = 0
    for path in folder.rglob("blocks.*"):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size += path.stat().st_size
    return size


def main() -> None:
    """Measure, print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="where the model is, or is made")
    parser.add_argument("--tokens", type=int, default=4032, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of serve, after --")
    args = parser.parse_args()
    rng = random.Random(1)
    prompts = [[rng.randrange(300, 30_000) for _ in range(args.tokens)] for _ in range(args.prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(args.model or Path(scratch) / "model", SHAPES[args.shape])
        flags = ["--max-model-len", str(args.tokens + NUM_OUTPUTS + 16), *args.flags]
        folder = Path(scratch) / "kv"
        computed = measure(model, prompts, folder, flags)
        disk_bytes = forget_pages(folder)
        read = measure(model, prompts, folder, flags)
    compare(("computed", computed), ("read", read))
    print(f"{disk_bytes / 1e6:.0f} MB on disk")
    if args.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(
            date, _commit(), machine(), args.shape, args.tokens, args.flags, computed, read, disk_bytes
        )
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
