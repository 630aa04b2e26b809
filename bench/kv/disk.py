"""Measure time to first token of long prompts: computed, and with KV read from disk by a restarted server.

    python -m bench.kv.disk --shape S [--tokens 4032] [--prompts 3] [--model FOLDER] [--save FILE] [-- FLAGS OF SERVE]

A server with ``--kv-disk`` computes the prompts, one after another, and is killed. The page cache of its files is dropped, so
that they are read from the disk. A second server with the same files gets the same prompts. The texts of both must be equal. The
model has a real shape and random weights; it is created in ``--model`` if missing.
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


class PromptResult(msgspec.Struct, frozen=True):
    """Result of one prompt."""

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
    computed: list[PromptResult]
    read: list[PromptResult]
    disk_bytes: int


def send_prompt(url: str, prompt: list[int]) -> PromptResult:
    """Send a prompt and read the streamed response."""
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
    return PromptResult(first_s, num_cached, text)


def compare(*runs: tuple[str, list[PromptResult]]) -> None:
    """Print the time to first token of two runs, their ratio, and whether the texts are equal."""
    for name, results in runs:
        seconds = [each.first_token_s for each in results]
        cached = [each.cached_tokens for each in results]
        listed = ", ".join(f"{each:.3f}" for each in seconds)
        print(f"{name:<9} TTFT {median(seconds):.3f} s ({listed}), cached tokens {cached}")
    one, other = (results for _, results in runs)
    gain = median(each.first_token_s for each in one) / median(each.first_token_s for each in other)
    same = [each.text == second.text for each, second in zip(one, other, strict=True)]
    print(f"speedup {gain:.1f}; same texts: {all(same)}")


def measure(model: Path, prompts: list[list[int]], folder: Path, flags: list[str]) -> list[PromptResult]:
    """Send all prompts to one server, then kill it."""
    with serve(model, [*flags, "--kv-disk", str(folder)]) as server:
        send_prompt(server.url, prompts[0][:64][::-1])  # warm-up
        results = [send_prompt(server.url, prompt) for prompt in prompts]
        time.sleep(2.0)  # wait for the writes of the last blocks
        server.process.kill()
    return results


def drop_page_cache(folder: Path) -> int:
    """Sync the files and drop them from the page cache; return their size in bytes."""
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
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(args.model or Path(scratch) / "model", SHAPES[args.shape])
        flags = ["--max-model-len", str(args.tokens + NUM_OUTPUTS + 16), *args.flags]
        folder = Path(scratch) / "kv"
        computed = measure(model, prompts, folder, flags)
        disk_bytes = drop_page_cache(folder)
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
