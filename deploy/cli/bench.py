"""``quintet bench``: measure a server over HTTP, or the engine without one."""

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

from quintet.deploy.config.flag_table import add_flags, flag_table
from quintet.deploy.config.flags import GROUP_TITLES, NETWORK
from quintet.deploy.tools.load_client.connection import BadUrl, Target
from quintet.deploy.tools.load_client.load import Load, Outcome, ask, run_load
from quintet.deploy.tools.load_client.report import Summary, summarise, table
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
Measure any OpenAI-compatible server: Quintet or another.

examples:
  quintet bench serve --num-prompts 500 --concurrency 64
      500 prompts of about 128 tokens, 128 output tokens each, 64 at a time, against 127.0.0.1:8000
  quintet bench serve --rate 10 --num-prompts 600 --json out.json
      one minute of Poisson arrivals, ten a second
  quintet bench serve --prompt-ids --vocab-size 32000 --input-len 1024 --shared-prefix-len 512 --ignore-eos
      exact lengths: random token ids, half of each prompt shared (prefix cache), outputs never cut short
  quintet bench serve --base-url http://other:9000 --model their-model --endpoint /v1/chat/completions
      a rival, through its chat endpoint
"""

_OFFLINE_HELP = """\
Measure the engine through the Python API: no HTTP, all prompts at once.

examples:
  quintet bench offline --num-prompts 500
  quintet bench offline ./my-model --input-len 512 --output-len 64 --max-num-seqs 128
      flags of `quintet serve` may follow
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench serve`` and ``bench offline``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a server over HTTP, or the engine without one",
        description="Measure a server over HTTP (`bench serve`), or the engine without one (`bench offline`).",
    )
    kinds = parser.add_subparsers(dest="bench_kind", required=True, metavar="serve|offline")
    _add_serve(kinds)
    _add_offline(kinds)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was asked for; return the exit status."""
    try:
        return _run_serve(args) if args.bench_kind == "serve" else _run_offline(args)
    except (BadUrl, BadWorkload) as error:
        print(f"quintet bench: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"quintet bench: {error}", file=sys.stderr)
        return 1


def _add_serve(kinds: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "serve",
        help="measure a running server",
        description=_SERVE_HELP,
        formatter_class=RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--base-url",
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the server (default: %(default)s)",
    )
    where.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="(default: %(default)s)")
    where.add_argument("--model", help="model name to ask for (default: the first the server lists)")
    where.add_argument("--api-key", help="sent as a bearer token")
    where.add_argument(
        "--header", action="append", default=[], metavar="NAME: VALUE", help="a header to send; repeatable"
    )
    when = parser.add_argument_group("when")
    when.add_argument(
        "--concurrency", type=_positive, help="requests in flight at most (default: 16 without --rate)"
    )
    when.add_argument(
        "--rate", type=_positive_float, help="arrivals per second, Poisson, instead of fixed concurrency"
    )
    when.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="requests sent first and not counted"
    )
    when.add_argument(
        "--timeout-s", type=_positive_float, default=600.0, help="per request (default: %(default)s)"
    )
    what = _add_workload(parser)
    what.add_argument(
        "--prompts", type=Path, metavar="FILE", help='JSON lines of {"prompt": …} or {"messages": …}'
    )
    what.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: %(default)s)")
    what.add_argument("--prompt-ids", action="store_true", help="send random token ids; needs --vocab-size")
    what.add_argument("--vocab-size", type=_positive, help="ids are below this")
    what.add_argument("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    what.add_argument("--extra-body", default="{}", metavar="JSON", help="fields added to every request body")
    result = parser.add_argument_group("result")
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")


def _add_workload(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declare what both benchmarks share of their workload; return the group for what one has more."""
    what = parser.add_argument_group("workload")
    what.add_argument("--num-prompts", type=_positive, help="(default: 200; all lines with --prompts)")
    what.add_argument(
        "--input-len", type=_positive, default=128, help="tokens per prompt (default: %(default)s)"
    )
    what.add_argument(
        "--output-len", type=_positive, default=128, help="tokens to ask for (default: %(default)s)"
    )
    what.add_argument("--shared-prefix-len", type=int, default=0, help="tokens that all prompts begin with")
    what.add_argument("--ignore-eos", action="store_true", help="go on to --output-len whatever is generated")
    return what


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


# --- bench serve ----------------------------------------------------------------------------------------------


def _run_serve(args: argparse.Namespace) -> int:
    target = Target.parse(args.base_url, args.api_key, dict(_header(line) for line in args.header))
    try:
        model = args.model or Client(args.base_url, target).first_model()
        items = _serve_items(args, target, model)
    except (OSError, TimeoutError) as error:
        print(
            f"quintet bench: cannot reach {args.base_url}: {error}\nIs a server running? Start one with `quintet serve`.",
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
    summary = measured(load)
    if args.json is not None:
        settings = {
            k: str(v) if isinstance(v, Path) else v
            for k, v in vars(args).items()
            if k not in ("api_key", "header") and _plain(v)
        }
        report = {"settings": settings | {"model": model}, "result": msgspec.to_builtins(summary)}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(table(summary))
    return 0 if summary.num_completed else 1


def measured(load: Load, progress: bool = True) -> Summary:
    """Run a load with a progress bar on a terminal, and return its figures."""
    with tqdm(total=len(load.bodies), unit="req", disable=None if progress else True, mininterval=0.5) as bar:

        def on_outcome(_: Outcome) -> None:
            bar.update()

        return summarise(run_load(load, on_outcome))


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | list | Path)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise BadWorkload(f"--header is {line!r}; it must look like 'Name: value'")
    return name.strip(), value.strip()


def _extra_body(text: str) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise BadWorkload(f"--extra-body is {text!r}; it must be a JSON object ({error})") from None


class _TokenCount(msgspec.Struct):
    """The part of a ``/tokenize`` answer that is needed."""

    count: int


def _serve_items(args: argparse.Namespace, target: Target, model: str) -> list[Item]:
    if args.prompts is not None:
        return read_prompts(args.prompts, args.num_prompts)
    if args.prompt_ids and args.vocab_size is None:
        raise BadWorkload("--prompt-ids needs --vocab-size, the number of ids to draw from")
    if args.prompt_ids and args.endpoint != "/v1/completions":
        raise BadWorkload("--prompt-ids needs --endpoint /v1/completions: chat takes text")
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
    """Ask the server's ``/tokenize`` what a word costs; 1 where it has none. The usage tells the true prompt lengths."""
    body = msgspec.json.encode({"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False})
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
    """The figures of one offline run."""

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
        help="measure the engine through the Python API",
        description=_OFFLINE_HELP,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="local folder or hub name (default: the one that ships with Quintet)",
    )
    _add_workload(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    add_flags(parser, tuple(group for group in GROUP_TITLES if group != NETWORK))


def _run_offline(args: argparse.Namespace) -> int:
    from quintet.deploy.python_api.offline import EngineError, RequestError

    try:
        return _measure_offline(args)
    except (EngineError, RequestError) as error:
        print(f"quintet bench: {error}", file=sys.stderr)
        return 1


def _measure_offline(args: argparse.Namespace) -> int:
    from quintet.deploy.python_api.offline import LLM, SamplingParams

    flags = {spec.key: getattr(args, spec.key) for spec in flag_table() if hasattr(args, spec.key)}
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
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    for name, value in msgspec.structs.asdict(summary).items():
        print(f"{name:<24}{value:>14,}")
    return 0
