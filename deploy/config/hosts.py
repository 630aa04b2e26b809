"""Validation of the flags of multi-host models (``--nnodes``)."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import secrets
from pathlib import Path

from quintet.deploy.config.flags import Options
from quintet.deploy.config.user_files import LEAST_BYTES, key_file_of
from quintet.wire.config import HostsConfig
from quintet.wire.errors import ConfigError

KEY_ADVICE = "the same secret on every host (head -c 32 /dev/urandom > FILE)"
BY_RAY = "--distributed-executor-backend ray"
OWN_ADDRESS = "127.0.0.1"


def hosts_config(options: Options) -> HostsConfig | None:
    """Return the section, or None for one host. Raises `ConfigError`."""
    count = options.nnodes
    _check_backend(options)
    if count == 1:
        _check_no_host_flags(options)
        return None
    _check_place(options)
    _check_division(options)
    if options.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {count} with --data-parallel-size {options.data_parallel_size}: only one engine can span hosts;"
            " start one group of hosts per engine, with quintet route in front"
        )
    given = OWN_ADDRESS if options.master_addr is None else options.master_addr
    address = address_of(given, options.master_port)
    return HostsConfig(count=count, address=address, key_file=_key_file(options))


def of_first(options: Options, run_dir: Path) -> Options:
    """Return the options that host 0 resolves. With Ray, they have the backend mp and a new group key in the run folder."""
    _check_backend(options)
    if options.distributed_executor_backend == "mp":
        return options
    path = run_dir / "group.key"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secrets.token_bytes(LEAST_BYTES))
    return dataclasses.replace(options, distributed_executor_backend="mp", group_key=str(path))


def _check_backend(options: Options) -> None:
    """Reject flags that conflict with the Ray backend."""
    if options.distributed_executor_backend == "mp":
        return
    if options.nnodes < 2:
        raise ConfigError(
            f"{BY_RAY} requires several hosts: set --nnodes, and --pipeline-parallel-size or --tensor-parallel-size, or drop"
            " it"
        )
    for flag, value, reason in (
        ("--headless", options.headless, "host 0 starts the other hosts"),
        ("--node-rank", options.node_rank, "this is host 0, and the others are numbered by Ray placement"),
        ("--group-key", options.group_key, "a new key is generated for each run"),
    ):  # fmt: skip
        if value:
            raise ConfigError(f"{flag} with {BY_RAY}: {reason}; drop {flag}")


def _check_division(options: Options) -> None:
    """Reject stages, or ranks of a single stage, that do not divide evenly among hosts."""
    count, stages, size = options.nnodes, options.pipeline_parallel_size, options.tensor_parallel_size
    fitting = ", ".join(str(count * each) for each in (1, 2, 3))
    if stages > 1 and stages % count:
        raise ConfigError(
            f"--nnodes {count} with --pipeline-parallel-size {stages}: stages must divide evenly among hosts; valid sizes:"
            f" {fitting}, …, or 1 with ranks divided among hosts"
        )
    if stages > 1:
        return
    if size % count:
        raise ConfigError(
            f"--nnodes {count} with --tensor-parallel-size {size}: ranks must divide evenly among hosts; valid sizes:"
            f" {fitting}, …; or set --pipeline-parallel-size to one of {fitting}, …"
        )
    for flag, is_given, reason in (
        (
            "--enable-expert-parallel",
            options.enable_expert_parallel,
            "ranks exchange expert rows through shared memory",
        ),
        (
            "--decode-context-parallel-size",
            options.decode_context_parallel_size > 1,
            "ranks read each other's KV through shared memory",
        ),
    ):
        if is_given:
            raise ConfigError(
                f"{flag} with --nnodes {count} and one stage: {reason}, which needs one host; drop it, or set"
                f" --pipeline-parallel-size {count}, so that the ranks of a stage are on one host"
            )


def check_first(options: Options) -> None:
    """Reject flags of other hosts in commands that resolve a configuration without serving."""
    if options.distributed_executor_backend == "ray":
        _check_backend(options)
        raise ConfigError(
            f"{BY_RAY} is supported by quintet serve only, which places the hosts; drop it here, and set --group-key"
        )
    hosts_config(options)
    if options.headless:
        raise ConfigError(
            "--headless is supported by quintet serve only: drop --headless and --node-rank here"
        )


def _check_place(options: Options) -> None:
    rank, count = options.node_rank, options.nnodes
    if rank >= count:
        raise ConfigError(f"--node-rank is {rank}; with --nnodes {count} it must be from 0 to {count - 1}")
    if rank > 0 and not options.headless:
        raise ConfigError(
            f"--node-rank {rank} requires --headless, because only host 0 serves HTTP; add --headless"
        )
    if rank == 0 and options.headless:
        raise ConfigError(
            "--headless with --node-rank 0: host 0 serves HTTP; drop --headless, or set another --node-rank"
        )


def _check_no_host_flags(options: Options) -> None:
    for flag, value in (
        ("--node-rank", options.node_rank),
        ("--headless", options.headless),
        ("--group-key", options.group_key),
    ):
        if value:
            raise ConfigError(f"{flag} requires several hosts: set --nnodes too, or drop it")


def address_of(given: str, port: int) -> str:
    """Return the address of host 0 as ``host:port``. Raises `ConfigError` if hosts cannot connect to it."""
    given = given.strip("[]")
    if not 0 < port < 1 << 16:
        raise ConfigError(f"--master-port is {port}; it must be from 1 to 65535")
    try:
        address = ipaddress.ip_address(given)
    except ValueError:
        if not given or any(char in given for char in ":/ ") or not given.isascii():
            raise ConfigError(
                f"--master-addr {given!r}: write a name or an address, such as 10.0.0.5; set the port with --master-port"
            ) from None
        return f"{given}:{port}"
    if address.is_unspecified:
        raise ConfigError(
            f"--master-addr {given} is a wildcard address, but the other hosts connect to it: write an address of host 0 that"
            " they can reach"
        )
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _key_file(options: Options) -> str:
    if options.group_key is None:
        raise ConfigError(
            f"--nnodes {options.nnodes}: links between hosts must be encrypted and authenticated: set --group-key FILE,"
            f" {KEY_ADVICE}"
        )
    return key_file_of("--group-key", options.group_key)
