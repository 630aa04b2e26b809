"""``quintet bench``: benchmarks a server over HTTP, or the engine through the Python API."""

from __future__ import annotations

import argparse
import json
import sys
import time
from argparse import RawDescriptionHelpFormatter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tqdm import tqdm

from quintet.deploy.config.deprecated_flags import RENAMED, add_deprecated_flags
from quintet.deploy.config.flag_table import NETWORK, add_flags, flag_table
from quintet.deploy.http_client.connection import BadUrl, Target
from quintet.deploy.http_client.pool import ask
from quintet.deploy.tools.load_client.load import Load, Outcome, run_load
from quintet.deploy.tools.load_client.report import (
    Summary,
    acceptance,
    acceptance_lines,
    read_counters,
    summarise,
    table,
)
from quintet.deploy.tools.load_client.talk import Client, ServerError
from quintet.deploy.tools.load_client.workload import (
    ENDPOINTS,
    WORDS,
    BadWorkload,
    Endpoint,
    Item,
    PromptSpec,
    RequestShape,
    poisson_arrivals,
    random_prompts,
    read_prompts,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_SERVE_HELP = """\
Benchmark any OpenAI-compatible server.

examples:
  quintet bench serve --num-prompts 500 --concurrency 64
      500 prompts of about 128 tokens, 128 output tokens each, 64 at a time, against 127.0.0.1:8000
  quintet bench serve --rate 10 --num-prompts 600 --json out.json
      one minute of Poisson arrivals at 10 requests per second
  quintet bench serve --prompt-ids --vocab-size 32000 --input-len 1024 --shared-prefix-len 512 --ignore-eos
      exact lengths: random token ids, half of each prompt shared (prefix cache), EOS ignored
  quintet bench serve --base-url http://other:9000 --model their-model --endpoint /v1/chat/completions
      another server, through its chat endpoint
"""

_OFFLINE_HELP = """\
Benchmark the engine through the Python API: no HTTP, all prompts at once.

examples:
  quintet bench offline --num-prompts 500
  quintet bench offline ./my-model --input-len 512 --output-len 64 --max-num-seqs 128
      flags of `quintet serve` may follow
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        description="Benchmark a server over HTTP (`bench serve`), or the engine without HTTP (`bench offline`).",
    )
    kinds = parser.add_subparsers(dest="bench_kind", required=True, metavar="serve|offline")
    _add_serve(kinds)
    _add_offline(kinds)


def run(args: argparse.Namespace) -> int:
    """Run the selected benchmark; return the exit status."""
    try:
        if args.json is not None and not args.json.parent.is_dir():
            raise BadWorkload(f"--json is {args.json}; create the folder {args.json.parent} first")
        return _run_serve(args) if args.bench_kind == "serve" else _run_offline(args)
    except (BadUrl, BadWorkload) as error:
        print(f"quintet bench: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"quintet bench: {error}", file=sys.stderr)
        return 1


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--concurrency",
        type=_positive,
        help="maximum number of requests in flight (default: 16 without --rate)",
    )
    traffic.add_argument(
        "--rate",
        type=_positive_float,
        help="requests per second with Poisson arrivals, instead of fixed concurrency",
    )
    traffic.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="number of warm-up requests, not measured"
    )
    traffic.add_argument(
        "--timeout-s", type=_positive_float, default=600.0, help="timeout per request (default: %(default)s)"
    )


def _add_serve(kinds: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "serve",
        help="benchmark a running server",
        description=_SERVE_HELP,
        formatter_class=RawDescriptionHelpFormatter,
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url",
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="server URL (default: %(default)s)",
    )
    server.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="(default: %(default)s)")
    server.add_argument("--model", help="model name (default: the first one that the server lists)")
    server.add_argument("--api-key", help="API key, sent as bearer token")
    server.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME: VALUE",
        help="additional request header; repeat for more",
    )
    _add_traffic(parser)
    workload = _add_workload(parser)
    workload.add_argument(
        "--prompts", type=Path, metavar="FILE", help='JSON lines of {"prompt": …} or {"messages": …}'
    )
    workload.add_argument(
        "--seed", type=int, default=0, help="random seed of prompts and arrivals (default: %(default)s)"
    )
    workload.add_argument(
        "--prompt-ids", action="store_true", help="send random token ids; requires --vocab-size"
    )
    workload.add_argument("--vocab-size", type=_positive, help="upper bound of random token ids")
    workload.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    workload.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="fields added to every request body"
    )
    result = parser.add_argument_group("result")
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    result.add_argument(
        "--speculative-report",
        action="store_true",
        help="also print the acceptance of draft tokens, from the server's /metrics before and after",
    )


def _add_workload(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declare the workload flags of both benchmarks; return the group for additional ones."""
    workload = parser.add_argument_group("workload")
    workload.add_argument(
        "--num-prompts", type=_positive, help="number of prompts (default: 200; all lines with --prompts)"
    )
    workload.add_argument(
        "--input-len", type=_positive, default=128, help="prompt length in tokens (default: %(default)s)"
    )
    workload.add_argument(
        "--output-len", type=_positive, default=128, help="output length in tokens (default: %(default)s)"
    )
    workload.add_argument(
        "--shared-prefix-len",
        type=int,
        default=0,
        help="length in tokens of the prefix that all prompts share",
    )
    workload.add_argument(
        "--ignore-eos", action="store_true", help="ignore EOS, and generate --output-len tokens"
    )
    return workload


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}; it must be at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}; it must be greater than 0")
    return value


# --- bench serve ----------------------------------------------------------------------------------------------


def _run_serve(args: argparse.Namespace) -> int:
    target = Target.parse(args.base_url, args.api_key, dict(_header(line) for line in args.header))
    try:
        model = args.model or Client(args.base_url, target).first_model()
        items = _serve_items(args, target, model)
    except (OSError, TimeoutError) as error:
        print(
            f"quintet bench: cannot reach {args.base_url}: {error}\nStart a server with `quintet serve`, or set --base-url.",
            file=sys.stderr,
        )
        return 1
    endpoint: Endpoint = args.endpoint
    shape = RequestShape(
        endpoint, model, args.output_len, args.ignore_eos, args.temperature, _extra_body(args.extra_body)
    )
    bodies = [shape.body(item) for item in items]
    if args.warmup > 0:
        warmup = (bodies * -(-args.warmup // len(bodies)))[: args.warmup]
        run_load(
            Load(target, endpoint, warmup, min(args.warmup, args.concurrency or 16), timeout_s=args.timeout_s)
        )
    arrivals = None if args.rate is None else poisson_arrivals(len(bodies), args.rate, args.seed)
    concurrency = args.concurrency or (None if args.rate is not None else 16)
    load = Load(target, endpoint, bodies, concurrency, arrivals, args.timeout_s)
    before = read_counters(target) if args.speculative_report else None
    summary = measured(load)
    accepted = None if before is None else acceptance(before, read_counters(target))
    print(table(summary))
    if args.speculative_report:
        print("\n".join(("", *acceptance_lines(accepted))))
    if args.json is not None:
        settings = {
            k: str(v) if isinstance(v, Path) else v
            for k, v in vars(args).items()
            if k not in ("api_key", "header") and _plain(v)
        }
        report = {"settings": settings | {"model": model}, "result": msgspec.to_builtins(summary)}
        if args.speculative_report:
            report["speculation"] = msgspec.to_builtins(accepted)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if summary.num_completed else 1


def measured(load: Load, progress: bool = True) -> Summary:
    """Run a load with a progress bar on a terminal, and return its metrics."""
    with tqdm(total=len(load.bodies), unit="req", disable=None if progress else True, mininterval=0.5) as bar:

        def on_outcome(_: Outcome) -> None:
            bar.update()

        return summarise(run_load(load, on_outcome))


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | list | Path)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise BadWorkload(f"--header is {line!r}; it must have the form 'Name: value'")
    return name.strip(), value.strip()


def _extra_body(text: str) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise BadWorkload(f"--extra-body is {text!r}; it must be a JSON object ({error})") from None


class _TokenCount(msgspec.Struct):
    """The used field of a ``/tokenize`` response."""

    count: int


def _serve_items(args: argparse.Namespace, target: Target, model: str) -> list[Item]:
    if args.prompts is not None:
        return read_prompts(args.prompts, args.num_prompts)
    if args.prompt_ids and args.vocab_size is None:
        raise BadWorkload("--prompt-ids requires --vocab-size, the number of token ids")
    if args.prompt_ids and args.endpoint != "/v1/completions":
        raise BadWorkload("--prompt-ids requires --endpoint /v1/completions: chat accepts text only")
    vocab_size = args.vocab_size if args.prompt_ids else None
    per_token = 1.0 if vocab_size is not None else words_per_token(target, model)
    return random_prompts(
        PromptSpec(
            args.num_prompts or 200,
            args.input_len,
            args.shared_prefix_len,
            vocab_size,
            per_token,
            args.seed,
        )
    )


def words_per_token(target: Target, model: str) -> float:
    """Return the words per token, from the server's ``/tokenize``; 1 without it. Usage reports exact prompt lengths."""
    body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    answer = ask(target, "POST", "/tokenize", body)
    if answer.status != 200:
        return 1.0
    try:
        count = msgspec.json.decode(answer.body, type=_TokenCount).count
    except msgspec.MsgspecError:
        return 1.0
    return len(WORDS) / max(1, count)


# --- bench offline --------------------------------------------------------------------------------------------


class OfflineSummary(msgspec.Struct):
    num_requests: int
    boot_s: float
    duration_s: float
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


def _add_offline(kinds: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "offline",
        help="benchmark the engine through the Python API",
        description=_OFFLINE_HELP,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="local folder or hub name (default: the toy model that ships with Quintet)",
    )
    _add_workload(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    add_flags(parser, without=NETWORK)
    add_deprecated_flags(parser)


def _run_offline(args: argparse.Namespace) -> int:
    from quintet.deploy.python_api.offline import EngineError, RequestError

    try:
        return _measure_offline(args)
    except (EngineError, RequestError) as error:
        print(f"quintet bench: {error}", file=sys.stderr)
        return 1


def _measure_offline(args: argparse.Namespace) -> int:
    from quintet.deploy.python_api.offline import LLM, SamplingParams

    keys = {spec.key for spec in flag_table()} | set(RENAMED)
    flags = {key: value for key, value in vars(args).items() if key in keys}
    num_prompts, seed = args.num_prompts or 200, getattr(args, "seed", 0)
    started_s = time.perf_counter()
    with LLM(**flags) as llm:
        boot_s = time.perf_counter() - started_s
        spec = PromptSpec(num_prompts, args.input_len, args.shared_prefix_len, llm.vocab_size, seed=seed)
        prompts = [item.prompt for item in random_prompts(spec) if isinstance(item.prompt, list)]
        params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=args.ignore_eos)
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        duration_s = time.perf_counter() - started_s
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    summary = OfflineSummary(
        num_requests=len(outputs),
        boot_s=round(boot_s, 3),
        duration_s=round(duration_s, 4),
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=sum(output.num_cached_tokens for output in outputs),
        output_tokens=output_tokens,
        requests_per_s=round(len(outputs) / duration_s, 3),
        prompt_tokens_per_s=round(prompt_tokens / duration_s, 2),
        output_tokens_per_s=round(output_tokens / duration_s, 2),
    )
    for name, value in msgspec.structs.asdict(summary).items():
        print(f"{name:<24}{value:>14,}")
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return 0
