"""The flags of a model on several hosts (``--nnodes``): which go together, and what follows from them."""

from __future__ import annotations

import ipaddress

from quintet.deploy.resolve.flags import Options
from quintet.deploy.resolve.key_files import key_file_of
from quintet.wire.config import HostsConfig
from quintet.wire.errors import ConfigError

KEY_ADVICE = "the same secret on every host (head -c 32 /dev/urandom > FILE)"


def hosts_config(options: Options) -> HostsConfig | None:
    """Return the section, or None where there is one host; reject what cannot be."""
    count = options.nnodes
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
    return HostsConfig(count=count, address=_address(options), key_file=_key_file(options))


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


def _address(options: Options) -> str:
    given, port = options.master_addr.strip("[]"), options.master_port
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
