"""Measure the speedup of speculative decoding on several kinds of text, in pairs over HTTP; the outputs must be equal.

    python -m bench.speculation [--model smollm2] [--method ngram] [--drafts 8] [--streams 1 8] [--rounds 5]
    python -m bench.speculation --method eagle3 --draft-model build/eagle3 --drafts 5 --kinds chat prose
    python -m bench.speculation --forced-only --kinds "extracted JSON" "invented JSON"
    python -m bench.speculation --model model.gguf --streams 1 --llama-cpp ~/.cache/quintet-peers/llamacpp/bin/python

Two servers, with and without drafts, run at once and get requests in alternating order. Requests are greedy, with a fixed length
unless they are chats or have a JSON schema. A request for one token caches the prompt first, so that only decoding is measured.
Each request has its own ``cache_salt``, so that suffix decoding does not find earlier outputs. Only "similar requests" share one:
they have the same instruction with different data.

--forced-only: the gain of a grammar's forced tokens alone. The method is ``ngram``, with the longest lookup, which finds almost
nothing.

--llama-cpp: the Python of an environment with llama-cpp-python, such as that of `bench.peers`. Rows of one stream then have
llama.cpp's tokens per second on the same GGUF file and prompt, without drafts and with its prompt lookup, or with the same
draft model, a GGUF file. Its outputs may differ.

Prints one JSON object with date, machine and commit. For each kind of text and number of streams it has: tokens per second
without drafts; median, smallest and largest ratio with drafts; acceptance rate; share of steps that accept the draft at each
position.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.arguments import command_parser
from bench.overhead.pairs import commit_of
from bench.overhead.run import machine
from bench.overhead.server import Server, serve
from quintet.deploy.config.speculation import MAX_LOOKUP
from quintet.deploy.http_client.pool import ConnectionPool, ask
from quintet.deploy.tools.load_client.report import acceptance, read_counters

NUM_TOKENS = 256
LOOKUPS = ((0, 0), (2, 10), (3, 8), (3, 4))
"""Prompt lookup of llama.cpp: n-gram size and number of drafts. The first is without drafts, the second the default."""
DRAFT_COUNTS = ((0, 0), (0, 2), (0, 4), (0, 8))
"""The same with a draft model."""
SOURCE = (Path(__file__).parents[1] / "core" / "policy.py").read_text()
NAMES = (
    "Lindqvist",
    "Okafor",
    "Marchetti",
    "Nakamura",
    "Duarte",
    "Petrov",
    "Haddad",
    "Moreau",
    "Silva",
    "Jansen",
    "Kaya",
)


def facts(variant: int) -> str:
    """Return five invoices; numbers and order of names depend on the variant."""
    lines = (
        f"Invoice {4711 + 53 * variant + row}: customer {NAMES[(3 * variant + row) % len(NAMES)]},"
        f" amount {(129 + 271 * variant + 89 * row) % 500} EUR, paid on 2026-0{1 + row}-1{1 + row}.\n"
        for row in range(5)
    )
    return "".join(lines)


QUESTIONS = (
    "Why do leaves change their colour in autumn?",
    "What should I check before I buy a used car?",
    "Explain in a few paragraphs how a refrigerator works.",
    "Give me five ideas for a birthday party of a ten-year-old.",
    "What is the difference between a virus and a bacterium?",
    "How do I prepare for a long flight?",
    "Explain in a few paragraphs what a prefix cache is good for.",
    "Write a short letter to a landlord about a broken window.",
)
"""Questions of chats, in turn; none of those that draft heads are trained on (`bench.embedded.chats`)."""
CHAT, FACTS, SIMILAR = "chat", facts(0), "similar requests"
CSV = "Write each invoice again as a line of CSV: number, customer, amount, date."
TEXTS: dict[str, Sequence[str]] = {
    "code edit": [
        f"Repeat this Python file, only rename the function fcfs to first_come:\n```python\n{SOURCE}```"
    ],
    "extraction": [f"{FACTS}\n{CSV}"],
    CHAT: QUESTIONS,
    "prose": ["Tell a story about a lighthouse keeper and her collection of sounds."],
    SIMILAR: [CSV],
    "extracted JSON": [f"{FACTS}\nWrite all invoices as JSON."],
    "invented JSON": ["Invent a customer of a bakery, and write the record as JSON."],
}


def _object(**properties: object) -> dict[str, object]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TEXT, _NUMBER = {"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0, "maximum": 9999}
_INVOICE = _object(
    invoice_number=_NUMBER, customer_name=_TEXT, amount_in_euros=_NUMBER, date_of_payment=_TEXT
)
SCHEMAS: dict[str, dict[str, object]] = {
    "extracted JSON": _object(invoices={"type": "array", "items": _INVOICE, "minItems": 5, "maxItems": 5}),
    "invented JSON": _object(
        first_name=_TEXT,
        last_name=_TEXT,
        delivery_address=_object(street_and_number=_TEXT, postal_code=_TEXT, city=_TEXT, country=_TEXT),
        preferred_payment_method={"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
        number_of_orders=_NUMBER,
        subscribed_to_newsletter={"type": "boolean"},
    ),
}
"""JSON schemas, by kind of text."""


def body_of(kind: str, model: str, number: int, index: int) -> dict[str, object]:
    """Return a request body; ``index`` distinguishes the concurrent requests of round ``number`` at the prompt's end."""
    schema, texts, salt = SCHEMAS.get(kind), TEXTS[kind], f"{kind} {number} {index}"
    text = texts[(number + index) % len(texts)]
    if kind == SIMILAR:
        text, salt = f"{facts(1 + 8 * number + index)}\n{text}", kind
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{text}{' ' * index}"}],
        "cache_salt": salt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": schema is None and kind != CHAT,
        "return_token_ids": True,
    }
    if schema is not None:
        described = {"name": "answer", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": described}
    return body


async def run_requests(server: Server, bodies: list[dict[str, object]]) -> tuple[float, list[list[int]]]:
    """Cache the prompts, then send all requests at once; return tokens per second and the output ids."""
    pool, path = ConnectionPool(server.target, 10.0), "/v1/chat/completions"
    try:
        await asyncio.gather(*(pool.ask("POST", path, body | {"max_tokens": 1}, 600.0) for body in bodies))
        began = time.perf_counter()
        answers = await asyncio.gather(*(pool.ask("POST", path, body, 600.0) for body in bodies))
        seconds = time.perf_counter() - began
    finally:
        await pool.close()
    outputs = [msgspec.json.decode(answer.body)["choices"][0]["token_ids"] for answer in answers]
    return sum(map(len, outputs)) / seconds, outputs


@dataclass(slots=True)
class LlamaCpp:
    """A driver of llama.cpp (`bench.speculation_llamacpp`)."""

    process: subprocess.Popen[str]
    settings: tuple[tuple[int, int], ...]
    """N-gram sizes and numbers of drafts to measure; the first is without drafts."""

    def tokens_per_s(self, prompt: list[int], ngram: int, drafts: int) -> float:
        """Return tokens per second of a generation with a cached prompt."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        rate = 0.0
        for num_tokens in (2, NUM_TOKENS):
            job = {"prompt": prompt, "num_tokens": num_tokens, "ngram": ngram, "drafts": drafts}
            print(json.dumps(job), file=self.process.stdin, flush=True)
            rate = json.loads(self.process.stdout.readline())["tokens_per_s"]
        return rate


@contextmanager
def llama_cpp(python: Path, model: str, context: int, draft_model: str | None) -> Iterator[LlamaCpp]:
    """Run the driver during the block."""
    script = Path(__file__).with_name("speculation_llamacpp.py")
    arguments = [model, str(os.cpu_count()), str(context), *([draft_model] if draft_model else [])]
    command = [str(python), "-P", str(script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield LlamaCpp(process, DRAFT_COUNTS if draft_model else LOOKUPS)


def prompt_of(server: Server, body: dict[str, object]) -> list[int]:
    """Return the token ids of a chat."""
    chat = {"model": body["model"], "messages": body["messages"]}
    token_ids: list[int] = msgspec.json.decode(ask(server.target, "POST", "/tokenize", chat).body)["tokens"]
    return token_ids


def compare(
    plain: Server,
    drafting: Server,
    peer: LlamaCpp | None,
    model: str,
    kind: str,
    streams: int,
    rounds: int,
) -> dict[str, object]:
    """Measure one row of the table."""
    rates: dict[str, list[float]] = {"plain": [], "drafting": []}
    peer_rates: dict[tuple[int, int], list[float]] = {
        setting: [] for setting in (peer.settings if peer else ())
    }
    before = read_counters(drafting.target)
    for number in range(rounds + 1):
        order = [("plain", plain), ("drafting", drafting)][:: 1 if number % 2 else -1]
        outputs = []
        bodies = [body_of(kind, model, number, index) for index in range(streams)]
        for name, server in order:
            rate, output_ids = asyncio.run(run_requests(server, bodies))
            rates[name].append(rate)
            outputs.append(output_ids)
        assert outputs[0] == outputs[1], f"{kind}: outputs differ with drafts"
        if peer is not None and kind not in SCHEMAS and streams == 1:
            for setting in peer.settings:
                peer_rates[setting].append(peer.tokens_per_s(prompt_of(plain, bodies[0]), *setting))
        if number == 0:  # the warm-up
            rates = {"plain": [], "drafting": []}
            before = read_counters(drafting.target)
    accepted = acceptance(before, read_counters(drafting.target))
    ratios = [new / old for old, new in zip(rates["plain"], rates["drafting"], strict=True)]
    medians = {setting: statistics.median(found[1:]) for setting, found in peer_rates.items() if found}
    peer_figures: dict[str, object] = {}
    if medians:
        best = max(medians, key=lambda setting: medians[setting])
        peer_figures = {
            "llama_cpp_tokens_per_s": round(medians[0, 0], 1),
            "llama_cpp_best_tokens_per_s": round(medians[best], 1),
            "llama_cpp_best_setting": best,
            "ratio_to_llama_cpp": round(statistics.median(rates["drafting"]) / medians[best], 3),
        }
    return {
        "kind": kind,
        "streams": streams,
        "plain_tokens_per_s": round(statistics.median(rates["plain"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "accepted": 0.0 if accepted is None else accepted.acceptance_rate,
        "accepted_per_position": [] if accepted is None else accepted.acceptance_per_position,
        **peer_figures,
    }


def main() -> None:
    """Read arguments, measure, and print the result."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="model folder, file or packaged name")
    methods = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp")
    parser.add_argument("--method", default="ngram", choices=methods, help="source of drafts")
    parser.add_argument("--draft-model", help="draft model or head")
    parser.add_argument("--draft-quantization", help="format of its weights, such as w8a8")
    parser.add_argument("--forced-only", action="store_true", help="no drafts but a grammar's forced tokens")
    parser.add_argument("--drafts", type=int, default=8, help="maximum drafts of a request in a step")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements of each row")
    parser.add_argument("--kinds", nargs="+", choices=list(TEXTS), default=list(TEXTS), help="kinds of text")
    parser.add_argument("--max-model-len", type=int, default=4096, help="context length")
    parser.add_argument("--activation-dtype", default="auto", help="of the served model, such as int8")
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON", help="measure llama.cpp too")
    options = parser.parse_args()
    settings: dict[str, object] = {"method": options.method, "num_speculative_tokens": options.drafts}
    if options.forced_only:
        settings |= dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), MAX_LOOKUP)
    if options.draft_model:
        settings["model"] = options.draft_model
    if options.draft_quantization:
        settings["quantization"] = options.draft_quantization
    config = json.dumps(settings)
    length = options.max_model_len
    flags = ["--kv-cache-memory", "1GB", "--max-model-len", str(length)]
    flags += ["--activation-dtype", options.activation_dtype]
    python = options.llama_cpp
    with (
        serve(options.model, flags) as plain,
        serve(options.model, [*flags, "--speculative-config", config]) as drafting,
        nullcontext()
        if python is None
        else llama_cpp(python, options.model, length, options.draft_model) as peer,
    ):
        served = msgspec.json.decode(ask(plain.target, "GET", "/v1/models").body)["data"][0]["id"]
        rows = [
            compare(plain, drafting, peer, served, kind, streams, options.rounds)
            for streams in options.streams
            for kind in options.kinds
        ]
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": msgspec.structs.asdict(machine()),
        "commit": commit_of(Path(__file__).parent),
        "model": Path(options.model).name,
        "activation_dtype": options.activation_dtype,
        "method": "forced tokens" if options.forced_only else options.method,
        "draft_model": options.draft_model and Path(options.draft_model).name,
        "draft_quantization": options.draft_quantization,
        "drafts": options.drafts,
        "rows": rows,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
