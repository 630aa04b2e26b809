"""Time of proposing drafts by prompt lookup and suffix decoding, for texts of different lengths, without a model.

    python -m bench.drafters [--tokens 1024 8192 32768] [--cached 500]

The text is random: tokens by a power law, and copies of earlier parts. Its next tokens are known, so accepted drafts advance the
request as in a server. Prints one JSON object. For each method and length it has: the time to index the text, median and 95th
percentile of a proposal for one row, and the number of accepted drafts.
"""

from __future__ import annotations

import datetime
import json
import random
import statistics
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from bench.arguments import command_parser
from bench.overhead.pairs import commit_of
from bench.overhead.run import machine
from quintet.executor.slots import SlotTables
from quintet.executor.speculation.drafters import DRAFTERS, Drafter, DraftRows
from quintet.wire.codec import pack_i32
from quintet.wire.config import SpeculativeConfig
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan

NUM_OUTPUTS, MAX_DRAFTS, VOCAB_SIZE = 2000, 8, 5000


def text_of(rng: random.Random, length: int) -> list[int]:
    """Return random tokens; a tenth of the draws copies 5 to 60 earlier ones."""
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 200 and rng.random() < 0.1:
            begin = rng.randrange(len(tokens) - 100)
            tokens += tokens[begin : begin + rng.randrange(5, 60)]
        else:
            tokens.append(int(rng.paretovariate(0.6)) % VOCAB_SIZE)
    return tokens[:length]


def admit(drafter: Drafter, tables: SlotTables, slot: int, tokens: list[int], num_prompt: int) -> None:
    """Admit a request to a slot, and write its prompt and outputs to the token table."""
    tables.token_ids[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    row = NewRow(slot, 1, slot, pack_i32(tokens[:num_prompt]), num_prompt, SamplingParams(), 0)
    drafter.note(StepPlan(1, 0, b"", [row], b"", b"", b"", b"", b"", b""))


def measure(method: str, num_prompt: int, num_cached: int) -> dict[str, object]:
    """Measure one method with one prompt length."""
    tables = SlotTables(2, num_prompt + NUM_OUTPUTS, full_layers(1, 1, 16, 4, 16), torch.device("cpu"))
    config = msgspec.convert({"method": method, "num_speculative_tokens": MAX_DRAFTS}, SpeculativeConfig)
    drafter = DRAFTERS[method](config, tables)
    for number in range(num_cached):
        admit(drafter, tables, 1, text_of(random.Random(number % 50), 500), 8)
        drafter.end(1, 500)
    tokens = text_of(random.Random(0), num_prompt + NUM_OUTPUTS)
    admit(drafter, tables, 0, tokens, num_prompt)
    num_known, num_accepted, seconds = num_prompt, 0, list[float]()
    while num_known + MAX_DRAFTS < len(tokens):
        began = time.perf_counter()
        (drafts,) = drafter.propose(DraftRows(np.array([0]), np.array([num_known]), np.array([MAX_DRAFTS])))
        seconds.append(time.perf_counter() - began)
        differs = np.flatnonzero(drafts != tokens[num_known : num_known + len(drafts)])
        accepted = int(differs[0]) if len(differs) else len(drafts)
        num_accepted, num_known = num_accepted + accepted, num_known + accepted + 1
    percentiles = statistics.quantiles(seconds[1:], n=20)
    return {
        "method": method,
        "tokens": num_prompt,
        "index_ms": round(seconds[0] * 1e3, 2),
        "median_us": round(statistics.median(seconds[1:]) * 1e6, 1),
        "p95_us": round(percentiles[-1] * 1e6, 1),
        "accepted_drafts": num_accepted,
    }


def main() -> None:
    """Read arguments, measure, and print the result."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 8192, 32768], help="tokens of the prompt"
    )
    parser.add_argument("--cached", type=int, default=500, help="cached outputs of 500 tokens")
    options = parser.parse_args()
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": msgspec.structs.asdict(machine()),
        "commit": commit_of(Path(__file__).parent),
        "rows": [
            measure(method, count, options.cached)
            for method in ("ngram", "suffix")
            for count in options.tokens
        ],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
