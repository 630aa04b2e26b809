"""Configuration of disaggregated prefill (``--role``) and its KV peers."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import tempfile

from quintet.deploy.config.flags import Options
from quintet.deploy.config.kv.transfer import KvSource
from quintet.deploy.config.user_files import LEAST_BYTES, key_file_of, user_cache
from quintet.wire.config import KvPeersConfig
from quintet.wire.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:5600"
DEFAULT_MEMORY = "1GiB"
THIS_MACHINE = ["127.0.0.0/8", "::1/128", "localhost"]


def kv_peers_config(source: KvSource) -> KvPeersConfig | None:
    """Return the section, or None if ``--role`` is none. Raises `ConfigError`."""
    options, role = source.options, source.options.role
    if role == "none":
        return None
    source.check(f"--role {role}")
    offers, fetches = role != "decode", role != "prefill"
    if not offers and (options.kv_peer_listen is not None or options.kv_peer_memory is not None):
        raise ConfigError(
            "--kv-peer-listen and --kv-peer-memory require a server that offers KV, but --role is decode: drop them, or set"
            " --role both"
        )
    if not fetches and options.kv_peers:
        raise ConfigError(
            "--kv-peers requires a server that fetches KV, but --role is prefill: drop it, or set --role both"
        )
    allowed = [_host(host) for host in options.kv_peers] or THIS_MACHINE if fetches else []
    for host in allowed if options.kv_peer_key is None else ():
        if not _is_this_machine(host):
            raise ConfigError(
                f"--kv-peers {host} is not this machine, so KV transfer must be authenticated: set --kv-peer-key FILE too, with"
                " the same secret on every server"
            )
    offered_bytes = (
        source.size_bytes(options.kv_peer_memory or DEFAULT_MEMORY, "--kv-peer-memory") if offers else 0
    )
    return KvPeersConfig(
        role=role,
        listen=_address(options) if offers else "",
        allowed=allowed,
        key_file=own_key_file()
        if options.kv_peer_key is None
        else key_file_of("--kv-peer-key", options.kv_peer_key),
        offered_bytes=offered_bytes // source.parts,
        staging_bytes=source.staging_bytes if fetches else 0,
    )


def _address(options: Options) -> str:
    """Return the listen address of KV transfer as ``host:port``."""
    flag, given = "--kv-peer-listen", options.kv_peer_listen or DEFAULT_ADDRESS
    host, _, port = given.removeprefix("tcp://").rpartition(":")
    last = int(port) + options.data_parallel_size - 1 if port.isascii() and port.isdecimal() else 0
    if not host or not 0 < last < 1 << 16 or int(port) < 1:
        raise ConfigError(
            f"{flag} {given}: write HOST:PORT, such as 10.0.0.5:5600; the port of every engine must be from 1 to 65535"
        )
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise ConfigError(
            f"{flag} {given}: {host} is not an IP address; write an address of this machine that other servers can reach, such"
            " as 10.0.0.5:5600"
        ) from None
    if address.is_unspecified:
        raise ConfigError(
            f"{flag} {given}: {host} is a wildcard address, but other servers connect to this address: write one that they can"
            " reach"
        )
    if not address.is_loopback and options.kv_peer_key is None:
        raise ConfigError(
            f"{flag} {given} accepts connections from other machines, so KV transfer must be encrypted: set --kv-peer-key FILE"
            " too, with the same secret on every server (head -c 32 /dev/urandom > FILE)"
        )
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _host(given: str) -> str:
    """Return a network in canonical form, or a host name."""
    try:
        return str(ipaddress.ip_network(given.strip("[]")))
    except ValueError:
        if "/" in given or ":" in given or not given:
            raise ConfigError(
                f"--kv-peers {given}: write a host or a network without port, such as 10.0.0.7, prefill-0.quintet or"
                " 10.0.0.0/24"
            ) from None
        return given.lower()


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_network(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_key_file() -> str:
    """Return the key file of this user's servers on this machine; create it if missing.

    Raises `ConfigError` if it cannot be created, or if other users could read it.
    """
    path = user_cache() / "kv-peer.key"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent) as made:  # mode 600
                made.write(secrets.token_bytes(LEAST_BYTES))
                made.flush()
                with contextlib.suppress(FileExistsError):  # created concurrently by another server
                    os.link(made.name, path)
        found = path.stat()
    except OSError as error:
        raise ConfigError(
            f"{path}, the default key of KV transfer, cannot be created or read: {error.strerror}; set --kv-peer-key FILE, the"
            " same on every server"
        ) from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or found.st_size < LEAST_BYTES:
        raise ConfigError(
            f"{path}, the default key of KV transfer, must belong to this user and have mode 600: remove it, or set"
            " --kv-peer-key FILE"
        )
    return str(path)
