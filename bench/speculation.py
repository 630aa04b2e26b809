"""Speed with and without drafts on texts of different kinds, in pairs over HTTP; the answers must be equal.

    python -m bench.speculation [--model smollm2] [--drafts 8] [--streams 1 8] [--rounds 5]

Both servers run at once, and one at a time is asked, in alternating order. Requests are greedy, of a fixed length, and their
prompts are cached by a warm-up, so the time is that of decoding. Prints one JSON object: per kind and number of streams, tokens
per second without drafts, the median ratio with drafts, the smallest and largest ratio, and the share of accepted drafts.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from pathlib import Path

import msgspec

from bench.arguments import command_parser
from bench.overhead.server import Server, serve
from quintet.deploy.http_client.pool import ConnectionPool, ask

NUM_TOKENS = 256
SOURCE = (Path(__file__).parents[1] / "core" / "policy.py").read_text()
FACTS = "".join(
    f"Invoice {number}: customer {name}, amount {amount} EUR, paid on 2026-0{month}-1{month}.\n"
    for number, name, amount, month in (
        (4711, "Lindqvist", 129, 1),
        (4712, "Okafor", 87, 2),
        (4713, "Marchetti", 450, 3),
        (4714, "Nakamura", 38, 4),
        (4715, "Duarte", 212, 5),
    )
)
TEXTS = {
    "code edit": f"Repeat this Python file, only rename the function fcfs to first_come:\n```python\n{SOURCE}```",
    "extraction": f"{FACTS}\nWrite each invoice again as a line of CSV: number, customer, amount, date.",
    "chat": "Explain in a few paragraphs what a prefix cache is good for.",
    "prose": "Tell a story about a lighthouse keeper and her collection of sounds.",
}


def body_of(text: str, model: str, index: int) -> dict[str, object]:
    """Return a request; ``index`` makes concurrent ones differ at their end."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"{text}{' ' * index}"}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def wave(server: Server, text: str, model: str, streams: int) -> tuple[float, list[list[int]]]:
    """Send a number of requests at once; return tokens per second and the outputs."""
    pool = ConnectionPool(server.target, 10.0)
    try:
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(
                pool.ask("POST", "/v1/chat/completions", body_of(text, model, index), 600.0)
                for index in range(streams)
            )
        )
        seconds = time.perf_counter() - began
    finally:
        await pool.close()
    outputs = [msgspec.json.decode(answer.body)["choices"][0]["token_ids"] for answer in answers]
    return sum(map(len, outputs)) / seconds, outputs


def counters(server: Server) -> tuple[float, float]:
    """Return the numbers of verified and accepted draft tokens so far."""
    text = ask(server.target, "GET", "/metrics").body.decode()
    found = re.findall(
        r"^quintet:spec_decode_num_(draft|accepted)_tokens_total{[^}]*} (\S+)$", text, re.MULTILINE
    )
    return tuple(sum(float(value) for name, value in found if name == kind) for kind in ("draft", "accepted"))  # type: ignore[return-value]


def compare(
    plain: Server, drafting: Server, model: str, kind: str, streams: int, rounds: int
) -> dict[str, object]:
    """Measure one row of the table."""
    rates: dict[str, list[float]] = {"plain": [], "drafting": []}
    before = (0.0, 0.0)
    for number in range(rounds + 1):
        order = [("plain", plain), ("drafting", drafting)][:: 1 if number % 2 else -1]
        outputs = []
        for name, server in order:
            rate, found = asyncio.run(wave(server, TEXTS[kind], model, streams))
            rates[name].append(rate)
            outputs.append(found)
        assert outputs[0] == outputs[1], f"{kind}: outputs differ with drafts"
        if number == 0:  # the warm-up
            rates = {"plain": [], "drafting": []}
            before = counters(drafting)
    num_drafts, num_accepted = (now - then for now, then in zip(counters(drafting), before, strict=True))
    ratios = [new / old for old, new in zip(rates["plain"], rates["drafting"], strict=True)]
    return {
        "kind": kind,
        "streams": streams,
        "plain_tokens_per_s": round(statistics.median(rates["plain"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "accepted": round(num_accepted / num_drafts, 3) if num_drafts else 0.0,
    }


def main() -> None:
    """Read arguments, measure, and print the result."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="model folder, file or packaged name")
    parser.add_argument("--drafts", type=int, default=8, help="maximum drafts of a request in a step")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements of each row")
    options = parser.parse_args()
    config = json.dumps({"method": "ngram", "num_speculative_tokens": options.drafts})
    flags = ["--kv-cache-memory", "1GB", "--max-model-len", "4096"]
    with (
        serve(options.model, flags) as plain,
        serve(options.model, [*flags, "--speculative-config", config]) as drafting,
    ):
        served = msgspec.json.decode(ask(plain.target, "GET", "/v1/models").body)["data"][0]["id"]
        rows = [
            compare(plain, drafting, served, kind, streams, options.rounds)
            for streams in options.streams
            for kind in TEXTS
        ]
    print(json.dumps({"drafts": options.drafts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
