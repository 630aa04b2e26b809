"""Measure how long prompts delay decoding streams, with prefill on the same server and on another one.

    python -m bench.kv.disaggregation [--shape S] [--layers 6] [--streams 4] [--tokens 2032] [--every 5] [--seconds 30]
        [--save FILE]

Two servers, ``--role prefill`` and ``--role decode``, have one core each; the clients share the second core. The decode server
serves ``--streams`` streams in four phases of ``--seconds``:

    baseline        no other load
    colocated       the decode server also prefills a prompt of ``--tokens`` every ``--every`` seconds
    disaggregated   the prefill server computes these prompts; the decode server fetches their KV
    independent     the prefill server computes other prompts and no KV is fetched: interference of the shared machine

Prints percentiles of the inter-token gaps, and the time to first token of the prompts. The prefill server also generates the
output of one prompt: both texts must be equal.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec

from bench.arguments import command_parser
from bench.overhead.run import Machine, _commit, machine
from bench.overhead.server import serve
from bench.peers.models import SHAPES, make_model

PHASES = ("baseline", "colocated", "disaggregated", "independent")
NUM_OUTPUTS = 8
MAX_LEN = 4096
STREAM_TOKENS = 64
"""Prompt length of the decoding streams."""


class Phase(msgspec.Struct, frozen=True):
    """Results of one phase."""

    name: str
    gaps_ms: dict[str, float]
    """Inter-token gaps of the streams, by percentile."""
    num_gaps: int
    first_token_s: list[float]
    """Time to first token of each long prompt."""
    cached_tokens: list[int]


class Report(msgspec.Struct, frozen=True):
    """Results of a run of this command."""

    date: str
    commit: str
    machine: Machine
    shape: str
    layers: int
    streams: int
    tokens: int
    every_s: float
    flags: list[str]
    phases: list[Phase]
    is_same_text: bool


def post(url: str, body: dict[str, object]) -> Iterator[bytes]:
    """Send a completion request; yield the lines of the response."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        yield from answer


def completion_body(prompt: list[int], **fields: object) -> dict[str, object]:
    """Return the body of a completion request."""
    return {"prompt": prompt, "max_tokens": NUM_OUTPUTS, "temperature": 0, "ignore_eos": True, **fields}


def stream(url: str, prompt: list[int], until: threading.Event, times: list[float]) -> None:
    """Read a stream until ``until`` is set; append the arrival time of each token to ``times``."""
    for line in post(url, completion_body(prompt, max_tokens=MAX_LEN - STREAM_TOKENS - 1, stream=True)):
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
        if until.is_set():
            return


def first_token(prefill: str, decode: str, prompt: list[int], phase: str) -> tuple[float, int, str]:
    """Send a long prompt as in a phase; return time to first token in seconds, number of cached tokens, and text."""
    begun_s, first_s, text, num_cached = time.perf_counter(), 0.0, "", 0
    fields: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
    url = prefill if phase == "independent" else decode
    if phase == "disaggregated":
        offers = completion_body(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        fields["kv_transfer_params"] = json.loads(b"".join(post(prefill, offers)))["kv_transfer_params"]
    for line in post(url, completion_body(prompt, **fields)):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event["choices"]:
                first_s = first_s or time.perf_counter() - begun_s
                text += event["choices"][0]["text"]
            if event.get("usage"):
                num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return first_s, num_cached, text


def run_phase(
    name: str, prefill: str, decode: str, prompts: list[list[int]], args: argparse.Namespace
) -> tuple[Phase, list[str]]:
    """Run the streams for ``args.seconds`` with the long prompts of a phase; return the results and the prompts' texts."""
    until, times = threading.Event(), [list[float]() for _ in range(args.streams)]
    streams: list[Future[None]] = []
    rng = random.Random(name)
    with ThreadPoolExecutor(args.streams + len(prompts) + 1) as clients:
        for each in times:
            prompt = [rng.randrange(300, 30_000) for _ in range(STREAM_TOKENS)]
            streams.append(clients.submit(stream, decode, prompt, until, each))
        while min(map(len, times)) < 5:
            time.sleep(0.01)
            for ended in streams:
                if ended.done():
                    ended.result()  # raises the stream's error
        begun_s, long_prompts = time.perf_counter(), list[Future[tuple[float, int, str]]]()
        while (left_s := begun_s + args.seconds - time.perf_counter()) > 0:
            if name != "baseline" and len(long_prompts) < len(prompts):
                long_prompts.append(
                    clients.submit(first_token, prefill, decode, prompts[len(long_prompts)], name)
                )
            time.sleep(min(args.every, left_s))
        ended_s = time.perf_counter()
        until.set()
        results = [each.result() for each in long_prompts]
    gaps = sorted(
        1e3 * (later - earlier)
        for each in times
        for earlier, later in itertools.pairwise(each)
        if begun_s < later < ended_s
    )
    by_percentile = {
        f"p{rank}": round(gaps[min(len(gaps) - 1, len(gaps) * rank // 100)], 2) for rank in (50, 90, 99)
    }
    by_percentile["max"] = round(gaps[-1], 2)
    phase = Phase(
        name,
        by_percentile,
        len(gaps),
        [round(each[0], 3) for each in results],
        [each[1] for each in results],
    )
    return phase, [each[2] for each in results]


def print_phase(phase: Phase) -> None:
    """Print the results of a phase."""
    gaps = ", ".join(f"{name} {value:.1f}" for name, value in phase.gaps_ms.items())
    ttft = f"; TTFT {median(phase.first_token_s):.2f} s" if phase.first_token_s else ""
    print(
        f"{phase.name:<13} gaps in ms: {gaps} ({phase.num_gaps}){ttft}, cached {phase.cached_tokens}",
        flush=True,
    )


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def main() -> None:
    """Measure, print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--layers", type=int, default=6, help="number of layers")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="folder of the model; created if missing"
    )
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2032, help="length of a long prompt")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of a phase")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of serve, after --")
    args = parser.parse_args()
    rng = random.Random(1)
    num_prompts = int(args.seconds // args.every) + 1
    prompts = {
        phase: [[rng.randrange(300, 30_000) for _ in range(args.tokens)] for _ in range(num_prompts)]
        for phase in PHASES
    }
    flags = ["--max-model-len", str(MAX_LEN), "--kv-cache-memory", "512MiB", "--threads", "1", *args.flags]
    listen = f"127.0.0.1:{free_port()}"
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        shape = replace(SHAPES[args.shape], layers=args.layers)
        model = make_model(args.model or Path(scratch) / "model", shape)
        os.sched_setaffinity(0, {cores[-1]})
        with serve(model, [*flags, "--role", "prefill", "--kv-peer-listen", listen]) as prefill:
            os.sched_setaffinity(0, {cores[0]})
            with serve(model, [*flags, "--role", "decode"]) as decode:
                warm = [rng.randrange(300, 30_000) for _ in range(256)]
                first_token(prefill.url, decode.url, warm, "disaggregated")
                phases, texts = list[Phase](), dict[str, list[str]]()
                for name in PHASES:
                    phase, texts[name] = run_phase(name, prefill.url, decode.url, prompts[name], args)
                    phases.append(phase)
                    print_phase(phase)
                prefill_text = first_token(
                    prefill.url, decode.url, prompts["disaggregated"][0], "independent"
                )[2]
    is_same = prefill_text == texts["disaggregated"][0]
    print(f"same text from the decode server and the prefill server: {is_same}")
    if args.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        report = Report(
            date, _commit(), machine(), args.shape, args.layers, args.streams, args.tokens, args.every,
            args.flags, phases, is_same,
        )  # fmt: skip
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
