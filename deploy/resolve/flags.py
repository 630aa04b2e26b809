"""The one table of flags: what a user may set, in which words, with which default.

The command line, the YAML file and ``LLM(**kwargs)`` are three spellings of `Options`; nothing else declares a flag.
What the values mean together is decided in `quintet.deploy.resolve.rules`.
"""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from quintet.wire.config import KvCacheDtype, Quantization
from quintet.wire.errors import ConfigError

Groups = tuple[str, ...]

MODEL, NETWORK, SCHEDULING, MEMORY, PROCESSES, DEVICE = (
    "model", "network", "scheduling", "memory", "processes", "device",
)  # fmt: skip

GROUP_TITLES: dict[str, str] = {
    MODEL: "model and tokenizer",
    NETWORK: "network and API",
    SCHEDULING: "scheduling",
    MEMORY: "KV memory",
    DEVICE: "device",
    PROCESSES: "processes",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """How one field of `Options` is shown to the user."""

    group: str
    help: str
    metavar: str | None = None
    default_text: str | None = None
    """What the default is in words, when the field's own default (None) says nothing."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user asked for, before the model card and the machine have been looked at."""

    # --- model ---
    model: Annotated[
        str | None,
        Flag(MODEL, "local folder or hub name", "MODEL", "the small model that ships with Quintet"),
    ] = None
    tokenizer: Annotated[
        str | None, Flag(MODEL, "folder or hub name of the tokenizer", "PATH", "the model's own")
    ] = None
    served_model_name: Annotated[
        list[str],
        Flag(MODEL, "name clients ask for; repeat for more, the first is echoed", "NAME", "MODEL as given"),
    ] = []
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Flag(MODEL, "number format of weights and KV; auto keeps the checkpoint's"),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Flag(
            MODEL,
            "longest prompt plus output, in tokens",
            "TOKENS",
            "the model's own, or less if memory is short",
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        Flag(MODEL, "dummy fills the weights with seeded random numbers instead of reading them"),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Flag(
            MODEL,
            "what linear layers become when they are loaded: int8 or int4 weights, or w8a8, which computes in 8 bit too",
        ),
    ] = "none"
    packed_cache: Annotated[
        str | None,
        Flag(
            MODEL,
            "folder where packed weights are kept, so that the next start maps them instead of packing again",
            "FOLDER",
            "none",
        ),
    ] = None
    chat_template: Annotated[
        str | None, Flag(MODEL, "Jinja file, or the template itself", "PATH", "the model's own")
    ] = None
    generation_config: Annotated[
        str,
        Flag(
            MODEL,
            "where sampling defaults come from: auto (the model's generation_config.json), none, or a folder",
            "WHERE",
        ),
    ] = "auto"
    seed: Annotated[int, Flag(MODEL, "seed of the random weights of --load-format dummy")] = 0

    # --- network ---
    host: Annotated[
        str,
        Flag(NETWORK, "address to listen on; 0.0.0.0 opens the server to the network: set --api-key then"),
    ] = "127.0.0.1"
    port: Annotated[int, Flag(NETWORK, "port to listen on; 0 picks a free one and prints it")] = 8000
    api_key: Annotated[
        list[str],
        Flag(NETWORK, "key that clients must present; repeat for more", "KEY", "none: open to localhost"),
    ] = []
    allowed_origins: Annotated[
        list[str],
        Flag(NETWORK, "web origin allowed to call from a browser; repeat for more", "ORIGIN", "none"),
    ] = []
    root_path: Annotated[str, Flag(NETWORK, "path prefix that a proxy in front strips", "PATH", "none")] = ""
    max_logprobs: Annotated[int, Flag(NETWORK, "most log-probabilities a request may ask for per token")] = 20
    max_body_bytes: Annotated[
        int | str, Flag(NETWORK, "largest request body, e.g. 32MiB", "SIZE", "32MiB")
    ] = "32MiB"
    max_queued_requests: Annotated[
        int, Flag(NETWORK, "requests one frontend holds at most; one more is answered 429 with Retry-After")
    ] = 4096
    max_queued_tokens: Annotated[
        int, Flag(NETWORK, "tokens these may owe, prompts and outputs; beyond it, 429 as well", "TOKENS")
    ] = 1 << 23
    stream_grace: Annotated[
        float,
        Flag(
            NETWORK,
            "how long a streamed request waits, paused, for a client that was cut off; 0 switches event ids off too",
            "SECONDS",
        ),
    ] = 30.0
    keep_alive_interval: Annotated[
        float,
        Flag(NETWORK, "seconds of silence after which a stream gets an SSE comment; 0 for never", "SECONDS"),
    ] = 15.0
    write_timeout: Annotated[
        float, Flag(NETWORK, "seconds a client may leave an answer unread; then it is cut off", "SECONDS")
    ] = 60.0
    header_timeout: Annotated[
        float, Flag(NETWORK, "seconds a client may take to send a request's headers", "SECONDS")
    ] = 20.0
    log_requests: Annotated[bool, Flag(NETWORK, "log one line per request")] = False
    trust_request_chat_template: Annotated[
        bool,
        Flag(
            NETWORK,
            "let requests bring chat templates of their own; only for clients you trust: a template is a program",
        ),
    ] = False

    # --- scheduling ---
    max_num_seqs: Annotated[int, Flag(SCHEDULING, "requests computed together at most")] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        Flag(
            SCHEDULING, "tokens computed in one step at most", "TOKENS", "2048, or what the other flags need"
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Flag(SCHEDULING, "compute long prompts in chunks beside the decoding of others")
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        Flag(SCHEDULING, "most tokens of one prompt per step while others wait; 0 for no limit", "TOKENS"),
    ] = 0
    step_target_ms: Annotated[
        int | None,
        Flag(
            SCHEDULING,
            "how long a step with prompts in it may hold up those who decode, about; 0 for as long as it takes",
            "MS",
            "250 on a CPU, 0 elsewhere and for LLM(...)",
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "longest"],
        Flag(
            SCHEDULING,
            "who goes first: first come first served, the lowest `priority` of the request, or, to end a batch soonest, "
            "the largest `max_tokens`",
            default_text="fcfs; longest for LLM(...)",
        ),
    ] = "fcfs"
    depth: Annotated[
        int, Flag(SCHEDULING, "steps in flight: 1 is synchronous, 2 plans a step while the last one computes")
    ] = 2
    refuse_hopeless: Annotated[
        bool,
        Flag(SCHEDULING, "refuse at once a request that will not meet its deadline, at the pace measured"),
    ] = True
    audit: Annotated[
        bool, Flag(SCHEDULING, "check every invariant after every step (slow; for debugging)")
    ] = False

    # --- memory ---
    kv_cache_memory: Annotated[
        int | str | None, Flag(MEMORY, "memory for KV, e.g. 2GiB", "SIZE", "a share of what is free")
    ] = None
    kv_cache_memory_share: Annotated[
        float, Flag(MEMORY, "share for KV of the memory left after the weights", "SHARE")
    ] = 0.4
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Flag(
            MEMORY,
            "number format of KV: int8 holds about twice the tokens of bf16, a little less exactly; CPU only",
        ),
    ] = "auto"
    block_size: Annotated[int, Flag(MEMORY, "tokens in a block of KV memory")] = 16
    enable_prefix_caching: Annotated[bool, Flag(MEMORY, "keep the KV of shared prompt beginnings")] = True

    # --- device ---
    executor: Annotated[
        Literal["auto", "torch", "mock"],
        Flag(DEVICE, "auto is torch; mock answers deterministic tokens without weights, to measure the rest"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Flag(DEVICE, "where the model runs; auto takes a GPU if there is one")
    ] = "auto"
    threads: Annotated[
        int,
        Flag(
            DEVICE,
            "compute threads of the executor; 0 takes every core it may use, on 8 or more all but one in eight",
        ),
    ] = 0
    pin_threads: Annotated[
        bool, Flag(DEVICE, "keep each compute thread on one core; for machines that serve nothing else")
    ] = False
    step_ms: Annotated[float, Flag(DEVICE, "mock executor only: how long a step takes", "MS")] = 0.0

    # --- processes ---
    frontends: Annotated[int, Flag(PROCESSES, "HTTP processes; they share the port")] = 1
    tokenizers: Annotated[int, Flag(PROCESSES, "processes that turn text into tokens")] = 1
    detokenizers: Annotated[int, Flag(PROCESSES, "processes that turn tokens into text")] = 1
    spares: Annotated[
        bool,
        Flag(
            PROCESSES,
            "keep a tokenizer and a detokenizer booted in reserve: when one dies, the next works at once",
        ),
    ] = True
    boot_timeout: Annotated[
        float, Flag(PROCESSES, "seconds the processes may take to get ready", "SECONDS")
    ] = 600.0
    max_restarts: Annotated[
        int | None,
        Flag(
            PROCESSES,
            "deaths of one process within a minute that are made good; one more ends the server",
            "COUNT",
            "5, or 12 of the executor",
        ),
    ] = None
    drain_timeout: Annotated[
        float, Flag(PROCESSES, "seconds that requests in flight get to finish after SIGTERM", "SECONDS")
    ] = 30.0
    stall_timeout: Annotated[
        float,
        Flag(PROCESSES, "seconds without a sign of life after which a process is replaced", "SECONDS"),
    ] = 10.0
    trace: Annotated[
        str | None,
        Flag(
            PROCESSES,
            "folder where each process writes what it did when, as it ends; `quintet trace FOLDER` reads it",
            "FOLDER",
            "none",
        ),
    ] = None
    record: Annotated[
        str | None,
        Flag(
            PROCESSES,
            "folder where each process keeps what it is sent and sends, prompts and outputs included, for `quintet replay`",
            "FOLDER",
            "none",
        ),
    ] = None
    record_mb: Annotated[
        int,
        Flag(PROCESSES, "MB that the recording of each process may take: the oldest part makes room", "MB"),
    ] = 512
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Flag(PROCESSES, "least important lines shown")
    ] = "INFO"


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One row of the table, read off `Options`."""

    key: str
    """As in Python and YAML: ``max_model_len``."""
    kind: type[int] | type[float] | type[str] | type[bool]
    """What one word of the command line becomes. Sizes stay text here; `memory.parse_size` reads them."""
    choices: tuple[str, ...] | None
    repeated: bool
    default: object
    flag: Flag

    @property
    def option(self) -> str:
        """The command-line spelling: ``--max-model-len``."""
        return "--" + self.key.replace("_", "-")


def flag_table() -> list[FlagSpec]:
    """Return every flag, in the order of `Options`."""
    hints = typing.get_type_hints(Options, include_extras=True)
    return [_spec(field, hints[field.name]) for field in msgspec.structs.fields(Options)]


def _spec(field: msgspec.structs.FieldInfo, hint: object) -> FlagSpec:
    annotated, flag = typing.get_args(hint)
    default = [] if field.default is msgspec.NODEFAULT else field.default
    origin = typing.get_origin(annotated)
    if origin is Literal:
        return FlagSpec(field.name, str, typing.get_args(annotated), False, default, flag)
    if origin is list:
        return FlagSpec(field.name, str, None, True, default, flag)
    members = typing.get_args(annotated) if origin is types.UnionType else (annotated,)
    kinds = [member for member in members if member is not type(None)]
    return FlagSpec(field.name, str if str in kinds else kinds[0], None, False, default, flag)


def add_flags(parser: argparse.ArgumentParser, groups: Groups = tuple(GROUP_TITLES)) -> None:
    """Declare the flags on a parser, group by group; absent flags leave no trace in the namespace.

    ``model`` is a positional argument of the commands, not a flag.
    """
    table = flag_table()
    for group in groups:
        section = parser.add_argument_group(GROUP_TITLES[group])
        for spec in table:
            if spec.flag.group == group and spec.key != "model":
                _add_flag(section, spec)


def _add_flag(section: argparse._ArgumentGroup, spec: FlagSpec) -> None:
    text = f"{spec.flag.help} (default: {_default_text(spec)})".replace("%", "%%")
    if spec.kind is bool:
        section.add_argument(
            spec.option, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    elif spec.repeated:
        section.add_argument(
            spec.option, action="append", metavar=spec.flag.metavar, default=argparse.SUPPRESS, help=text
        )
    elif spec.choices:
        section.add_argument(
            spec.option, choices=spec.choices, type=_choice_reader(spec.choices),
            default=argparse.SUPPRESS, help=text,
        )  # fmt: skip
    else:
        section.add_argument(
            spec.option,
            type=spec.kind,
            metavar=spec.flag.metavar or ("N" if spec.kind is int else spec.key.rpartition("_")[2].upper()),
            default=argparse.SUPPRESS,
            help=text,
        )


def _choice_reader(choices: tuple[str, ...]) -> typing.Callable[[str], str]:
    """Accept a choice in any case, so that ``--log-level info`` works."""
    by_lower = {choice.lower(): choice for choice in choices}
    return lambda word: by_lower.get(word.lower(), word)


def _default_text(spec: FlagSpec) -> str:
    if spec.flag.default_text is not None:
        return spec.flag.default_text
    if spec.kind is bool:
        return "on" if spec.default else "off"
    return str(spec.default)


def make_options(settings: Mapping[str, object], source: str) -> Options:
    """Check names and types of settings and return them as `Options`.

    ``source`` says in error messages where the settings stand (a file's name, ``LLM(...)``, ``the command line``).
    Keys are accepted with dashes or underscores; an unknown one is answered with the nearest valid key.
    """
    known = [spec.key for spec in flag_table()]
    values: dict[str, object] = {}
    for raw_key, value in settings.items():
        key = str(raw_key).replace("-", "_")
        if key not in known:
            raise ConfigError(f"{source}: unknown key {str(raw_key)!r}{_nearest(key, known)}")
        values[key] = [value] if isinstance(value, str) and _is_list(key) else value
    try:
        return msgspec.convert(values, Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_reworded(str(error), values)}") from None


def _is_list(key: str) -> bool:
    return isinstance(getattr(Options(), key), list)


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "; `quintet serve --help` lists the valid ones"


def _reworded(words: str, values: Mapping[str, object]) -> str:
    """Turn msgspec's ``Expected `int`, got `str` - at `$.port` `` into the key, its value and what is allowed."""
    what, _, where = words.partition(" - at `$.")
    key = where.rstrip("`").split("[")[0]
    if key not in values:
        return words
    sent = values[key]
    allowed = next((spec.choices for spec in flag_table() if spec.key == key), None)
    expected = f"one of {', '.join(allowed)}" if allowed else what.removeprefix("Expected ").split(", got")[0]
    return f"{key} is {sent!r}, which is not {expected.replace('`', '')}"
