"""Measure what LoRA adapters cost, over HTTP: the same requests for the model, for one adapter, and for several in turn.

    python -m bench.lora [--model smollm2] [--rank 16] [--adapters 4] [--streams 1 8 32] [--rounds 5]

Two servers, with and without adapters, run at once and get requests in alternating order. The adapters have random weights, in
all linear layers of a Llama model. Requests are greedy, with a fixed length. Decode: tokens per second of requests with cached
prompts. Prefill: prompt tokens per second of requests for one token.

Prints one JSON object with date, machine and commit. For each row it has tokens per second of the server without adapters, and
the ratios of the server with adapters: requests for the model itself, for one adapter, and for all adapters in turn.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from bench.arguments import command_parser
from bench.overhead.pairs import commit_of
from bench.overhead.run import machine
from bench.overhead.server import Server, serve
from bench.speculation import run_requests
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.http_client.pool import ConnectionPool

PROMPT_WORDS = 1000
NUM_TOKENS = 128
WORDS = ("river", "stone", "quick", "seven", "cloud", "letter", "green", "under")


def write_adapter(folder: Path, hf_config: Mapping[str, int], rank: int, seed: int) -> None:
    """Write random matrices for all linear layers of a Llama model."""
    hidden, wide, heads = (
        hf_config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = hf_config.get("head_dim") or hidden // heads
    queries, keys = heads * head, hf_config.get("num_key_value_heads", heads) * head
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(hf_config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn((rank, inputs), generator=draw) * inputs**-0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn((outputs, rank), generator=draw) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    )


def bodies_of(names: Sequence[str], streams: int, number: int) -> list[dict[str, object]]:
    """Return request bodies of a round: one per stream, for the names in turn."""
    return [
        {
            "model": names[index % len(names)],
            "messages": [
                {"role": "user", "content": f"Tell a story about {WORDS[index % 8]} {number} {index}."}
            ],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for index in range(streams)
    ]


async def prompt_rate(server: Server, name: str, number: int) -> float:
    """Return prompt tokens per second of one long prompt that is not cached."""
    pool = ConnectionPool(server.target, 10.0)
    text = " ".join(WORDS[(i * i + i // 7) % 8] for i in range(PROMPT_WORDS))
    body = {"model": name, "prompt": f"{number} {text}", "max_tokens": 1, "temperature": 0}
    try:
        began = time.perf_counter()
        answer = await pool.ask("POST", "/v1/completions", body, 600.0)
        seconds = time.perf_counter() - began
    finally:
        await pool.close()
    return float(msgspec.json.decode(answer.body)["usage"]["prompt_tokens"]) / seconds


def compare(
    plain: Server, adapted: Server, names: Sequence[str], streams: int, rounds: int
) -> dict[str, object]:
    """Measure one row; streams 0: prefill."""
    cases = {"plain": (plain, names[:1]), "model": (adapted, names[:1]), "one adapter": (adapted, names[1:2])}
    if streams:
        cases["all adapters"] = (adapted, names[1:])
    rates: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case, (server, chosen) in list(cases.items())[:: 1 if number % 2 else -1]:
            if streams:
                rate, _ = asyncio.run(run_requests(server, bodies_of(chosen, streams, number)))
            else:
                rate = asyncio.run(prompt_rate(server, chosen[0], number))
            if number:  # round 0 is the warm-up
                rates[case].append(rate)
    row: dict[str, object] = {"kind": f"decode, {streams} streams" if streams else "prefill"}
    row["plain_tokens_per_s"] = round(statistics.median(rates["plain"]), 1)
    for case in list(cases)[1:]:
        ratios = [new / old for old, new in zip(rates["plain"], rates[case], strict=True)]
        row[case] = {
            "ratio": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return row


def main() -> None:
    """Read arguments, measure, and print the result."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="model folder, file or packaged name: a Llama model"
    )
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--adapters", type=int, default=4, help="number of adapters")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements of each row")
    options = parser.parse_args()
    hf_config = json.loads(read_facts(locate_model(options.model, with_weights=True)).hf_config)
    flags = ["--served-model-name", "model", "--kv-cache-memory", "1GB", "--max-model-len", "4096"]
    names = ["model", *(f"adapter-{i}" for i in range(options.adapters))]
    with tempfile.TemporaryDirectory() as folder:
        modules = []
        for seed, name in enumerate(names[1:]):
            write_adapter(Path(folder) / name, hf_config, options.rank, seed)
            modules.append(f"{name}={Path(folder) / name}")
        with (
            serve(options.model, flags) as plain,
            serve(options.model, [*flags, "--lora-modules", *modules]) as adapted,
        ):
            rows = [
                compare(plain, adapted, names, streams, options.rounds) for streams in (*options.streams, 0)
            ]
    report = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": msgspec.structs.asdict(machine()),
        "commit": commit_of(Path(__file__).parent),
        "model": Path(options.model).name,
        "rank": options.rank,
        "adapters": options.adapters,
        "rows": rows,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
