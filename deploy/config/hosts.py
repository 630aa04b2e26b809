"""The flags of a model on several hosts (``--nnodes``): which go together, and what follows from them."""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path

import msgspec

from quintet.deploy.config.flags import Options
from quintet.deploy.config.key_files import LEAST_BYTES, key_file_of
from quintet.wire.config import HostsConfig
from quintet.wire.errors import ConfigError

KEY_ADVICE = "the same secret on every host (head -c 32 /dev/urandom > FILE)"
BY_RAY = "--distributed-executor-backend ray"
OWN_ADDRESS = "127.0.0.1"


def hosts_config(options: Options) -> HostsConfig | None:
    """Return the section, or None where there is one host; reject what cannot be."""
    count = options.nnodes
    _check_backend(options)
    if count == 1:
        _check_nothing_is_said(options)
        return None
    _check_place(options)
    _check_division(options)
    if options.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {count} with --data-parallel-size {options.data_parallel_size}: one engine is on several hosts so far;"
            " start a group of hosts for each, behind quintet route"
        )
    given = OWN_ADDRESS if options.master_addr is None else options.master_addr
    address = address_of(given, options.master_port)
    return HostsConfig(count=count, address=address, key_file=_key_file(options))


def of_first(options: Options, run_dir: Path) -> Options:
    """Return what the first host resolves: where Ray starts the others, what it would with a key of this run's own."""
    _check_backend(options)
    if options.distributed_executor_backend == "mp":
        return options
    path = run_dir / "group.key"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secrets.token_bytes(LEAST_BYTES))
    return msgspec.structs.replace(options, distributed_executor_backend="mp", group_key=str(path))


def _check_backend(options: Options) -> None:
    """Reject what cannot go with hosts that Ray places."""
    if options.distributed_executor_backend == "mp":
        return
    if options.nnodes < 2:
        raise ConfigError(
            f"{BY_RAY} starts the other hosts of a model on several: give --nnodes, and --pipeline-parallel-size or"
            " --tensor-parallel-size, or drop it"
        )
    for flag, value, reason in (
        ("--headless", options.headless, "the other hosts are started by the first"),
        ("--node-rank", options.node_rank, "the first host is this one, and the others are numbered as Ray places them"),
        ("--group-key", options.group_key, "each run has a key of its own, which the others are handed"),
    ):  # fmt: skip
        if value:
            raise ConfigError(f"{flag} with {BY_RAY}: {reason}; drop {flag}")


def _check_division(options: Options) -> None:
    """Reject what hosts cannot have as much of each: stages, or ranks of the only one."""
    count, stages, size = options.nnodes, options.pipeline_parallel_size, options.tensor_parallel_size
    fitting = ", ".join(str(count * each) for each in (1, 2, 3))
    if stages > 1 and stages % count:
        raise ConfigError(
            f"--nnodes {count} with --pipeline-parallel-size {stages}: hosts have as many stages each, and the ranks of a stage"
            f" are on one; sizes that fit: {fitting}, …, or 1, whose ranks may be on all hosts"
        )
    if stages > 1:
        return
    if size % count:
        raise ConfigError(
            f"--nnodes {count} with --tensor-parallel-size {size}: hosts have as many ranks each; sizes that fit: {fitting}, …;"
            f" or give --pipeline-parallel-size, one of {fitting}, …"
        )
    for flag, is_given, reason in (
        (
            "--enable-expert-parallel",
            options.enable_expert_parallel,
            "each rank reads rows of experts that lie in the others' memory, in places that every step gives out anew",
        ),
        (
            "--decode-context-parallel-size",
            options.decode_context_parallel_size > 1,
            "ranks read each other's keys and values in memory that they share",
        ),
    ):
        if is_given:
            raise ConfigError(
                f"{flag} with --nnodes {count} and one stage: {reason}, and hosts share none; drop it, or give"
                f" --pipeline-parallel-size {count}, whose ranks are on one host"
            )


def check_first(options: Options) -> None:
    """Reject what cannot be of a host that resolves everything for the others."""
    if options.distributed_executor_backend == "ray":
        _check_backend(options)
        raise ConfigError(
            f"{BY_RAY} is of quintet serve, which makes the key of the hosts and places them; drop it here, and give --group-key"
        )
    hosts_config(options)
    if options.headless:
        raise ConfigError(
            "--headless is of quintet serve, whose first host says what is computed: drop --headless and --node-rank here"
        )


def _check_place(options: Options) -> None:
    rank, count = options.node_rank, options.nnodes
    if rank >= count:
        raise ConfigError(f"--node-rank {rank} with --nnodes {count}: hosts are 0 to {count - 1}")
    if rank > 0 and not options.headless:
        raise ConfigError(
            f"--node-rank {rank} without --headless: requests go to host 0, this one only computes for it; add --headless"
        )
    if rank == 0 and options.headless:
        raise ConfigError(
            "--headless with --node-rank 0: the first host answers; drop --headless, or give another --node-rank"
        )


def _check_nothing_is_said(options: Options) -> None:
    for flag, value in (
        ("--node-rank", options.node_rank),
        ("--headless", options.headless),
        ("--group-key", options.group_key),
    ):
        if value:
            raise ConfigError(f"{flag} is of a model on several hosts: give --nnodes too, or drop it")


def address_of(given: str, port: int) -> str:
    """Return the address of the first host as it is dialled; reject what nobody can dial."""
    given = given.strip("[]")
    if not 0 < port < 1 << 16:
        raise ConfigError(f"--master-port {port}: ports are 1 to 65535")
    try:
        address = ipaddress.ip_address(given)
    except ValueError:
        if not given or any(char in given for char in ":/ ") or not given.isascii():
            raise ConfigError(
                f"--master-addr {given!r}: write a name or an address, such as 10.0.0.5; the port is --master-port"
            ) from None
        return f"{given}:{port}"
    if address.is_unspecified:
        raise ConfigError(
            f"--master-addr {given}: the others are told this address, and it is none of a machine's: write the one by which they"
            " reach the first host"
        )
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _key_file(options: Options) -> str:
    if options.group_key is None:
        raise ConfigError(
            f"--nnodes {options.nnodes}: hosts believe each other, and what passes between them is as private as prompts are:"
            f" give --group-key FILE, {KEY_ADVICE}"
        )
    return key_file_of("--group-key", options.group_key)
