"""Configuration of the KV back ends: ``--kv-transfer-config``, its shorthand flags, and their common conditions.

The JSON has a section per back end. Each key is a flag under another name, so both have one meaning and one check:

    {"host": {"size": "4GiB"}, "disk": {"folder": "/var/cache/quintet"}, "store": {"url": "file:///mnt/kv"},
     "peers": {"role": "decode", "hosts": ["10.0.0.0/24"], "key_file": "/etc/kv.key"}}

vLLM's keys for prefill and decode servers are accepted too: ``{"kv_connector": "NixlConnector", "kv_role": "kv_both"}``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quintet.deploy.config.flag import json_object
from quintet.deploy.config.flags import Options
from quintet.deploy.config.memory import format_size, parse_size
from quintet.process.own_files import ownership_error
from quintet.wire.errors import ConfigError
from quintet.wire.kv_spec import KvSpec

FLAG = "--kv-transfer-config"
SECTIONS: dict[str, dict[str, str]] = {
    "host": {"size": "swap_space"},
    "disk": {"folder": "kv_disk", "size": "kv_disk_size"},
    "peers": {
        "role": "role",
        "listen": "kv_peer_listen",
        "hosts": "kv_peers",
        "key_file": "kv_peer_key",
        "memory": "kv_peer_memory",
    },
    "store": {"url": "kv_store", "size": "kv_store_size"},
}
"""Back end -> key -> option. The first option enables the back end, and the others require it."""
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
"""vLLM's ``kv_role`` -> ``--role``."""
PEER_CONNECTORS = ("NixlConnector", "P2pNcclConnector")
"""vLLM's connectors between prefill and decode servers."""
OFFLOADING = "OffloadingConnector"
"""vLLM's connector to host memory, which ``--kv-offloading-size`` also configures."""
OFFLOADING_BYTES = "cpu_bytes_to_use"
_EXTRA = "kv_connector_extra_config"
NO_EFFECT = frozenset({
    *("enable_permute_local_kv", "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_connector_module_path", _EXTRA),
    *("kv_ip", "kv_load_failure_policy", "kv_parallel_size", "kv_port", "kv_rank"),
})  # fmt: skip
"""Further keys of vLLM beside ``kv_connector``. They have no effect here."""
MAX_STAGING_BYTES = 512 << 20
"""Limit of host memory for KV fetched for waiting requests, per back end."""


def with_kv_transfer_config(options: Options) -> Options:
    """Return the options with those of ``--kv-transfer-config``. Raises `ConfigError`."""
    changes = dict[str, object]()
    for name, value in _settings(dict(options.kv_transfer_config)):
        if _is_set(options, name):
            raise ConfigError(f"{FLAG} and {_flag_of(name)} are both set: drop one of the two")
        changes[name] = parse_size(value, f"{FLAG} host size") / (1 << 30) if name == "swap_space" else value
    try:
        options = msgspec.convert(dataclasses.asdict(options) | changes, Options) if changes else options
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG}: {error}") from None
    _check_required(options)
    return options


def notes_on_transfer(options: Options) -> list[str]:
    """Return a note on the keys of vLLM without effect."""
    given = options.kv_transfer_config
    ignored = sorted(given.keys() & NO_EFFECT) if "kv_connector" in given else []
    if given.get("kv_connector") == OFFLOADING:
        ignored = [key for key in ignored if key != _EXTRA]
    return [f"{FLAG}: keys without effect: {', '.join(ignored)}"] if ignored else []


def _check_required(options: Options) -> None:
    """Reject settings of a back end that is not enabled."""
    for first, *others in (keys.values() for keys in SECTIONS.values()):
        for name in others if not _is_set(options, first) else ():
            if _is_set(options, name):
                flag, required = _flag_of(name), _flag_of(first)
                values = " prefill, decode or both" if first == "role" else ""
                raise ConfigError(f"{flag} requires {required}{values}: set {required}, or drop {flag}")


def _is_set(options: Options, name: str) -> bool:
    return bool(getattr(options, name) != getattr(Options(), name))


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _settings(sections: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the option and value of each key. Raises `ConfigError`."""
    connector, role = sections.pop("kv_connector", None), sections.pop("kv_role", None)
    extra = sections.get(_EXTRA)
    if connector is not None:
        sections = {key: value for key, value in sections.items() if key not in NO_EFFECT}
    if connector == OFFLOADING and isinstance(extra, dict) and OFFLOADING_BYTES in extra:
        if extra.get("secondary_tiers"):
            raise ConfigError(f"{FLAG}: secondary_tiers is not supported: write the sections host and disk")
        yield "swap_space", extra[OFFLOADING_BYTES]
    elif connector is not None or role is not None:
        if connector not in PEER_CONNECTORS or role not in ROLES:
            keys = {"kv_connector": connector, "kv_role": role}
            sent = " with ".join(f"{key} {value!r}" for key, value in keys.items() if value is not None)
            raise ConfigError(
                f"{FLAG}: {sent} is not supported; write"
                f" {' or '.join(PEER_CONNECTORS)} with {', '.join(ROLES)}, or sections of back ends: {', '.join(SECTIONS)}"
            )
        yield "role", ROLES[role]
    for section, keys in sections.items():
        if section not in SECTIONS:
            raise ConfigError(f"{FLAG}: unknown back end {section!r}; write {', '.join(SECTIONS)}")
        for key, value in json_object(keys, f"{FLAG} {section}").items():
            if key not in SECTIONS[section]:
                known = ", ".join(SECTIONS[section])
                raise ConfigError(f"{FLAG}: unknown key {key!r} of {section}; write {known}")
            yield SECTIONS[section][key], value


def leaves_executor(options: Options) -> bool:
    """Return whether a back end other than host memory is configured."""
    enabling = [next(iter(keys.values())) for section, keys in SECTIONS.items() if section != "host"]
    return any(_is_set(options, name) for name in enabling)


@dataclass(frozen=True, slots=True)
class KvSource:
    """KV memory of an engine, as a source of the back ends' blocks."""

    options: Options
    device: str
    kv: KvSpec
    max_model_len: int
    step_tokens: int
    has_prefix_cache: bool

    def check(self, flag: str) -> None:
        """Raise `ConfigError` if the executor cannot export KV blocks, as ``flag`` requires."""
        options = self.options
        if options.executor == "mock":
            raise ConfigError(f"{flag}: the mock executor has no KV cache; drop the flag")
        if self.device != "cpu":
            raise ConfigError(f"{flag} is supported on CPUs only: drop it, or set --device cpu")
        if options.nnodes > 1:
            raise ConfigError(
                f"{flag} is not supported with several hosts (--nnodes {options.nnodes}): drop one of the two"
            )
        if not self.has_prefix_cache:
            raise ConfigError(
                f"{flag} requires prefix caching, which is disabled (by --no-enable-prefix-caching, or because the model's RoPE"
                " depends on sequence length): drop one of the two"
            )

    @property
    def parts(self) -> int:
        """KV memories that each hold a part of every block; resolved sizes are per KV memory."""
        return self.options.tensor_parallel_size // self.options.decode_context_parallel_size

    @property
    def request_bytes(self) -> int:
        """Bytes of a request of full length, per KV memory."""
        return self.kv.most_blocks(self.max_model_len, self.step_tokens) * self.kv.offloaded_bytes_per_block

    @property
    def staging_bytes(self) -> int:
        """Host memory for fetches, per KV memory: for one request, at least for one block."""
        return max(
            self.kv.offloaded_bytes_per_block, min(MAX_STAGING_BYTES // self.parts, self.request_bytes)
        )

    def size_bytes(self, value: int | str, flag: str) -> int:
        """Return a size over all KV memories. Raises `ConfigError` if one request does not fit."""
        size_bytes, least = parse_size(value, flag), self.request_bytes * self.parts
        if size_bytes < least:
            raise ConfigError(
                f"{flag} is {format_size(size_bytes)}, but one request of {self.max_model_len} tokens needs"
                f" {format_size(least)}: raise it, or lower --max-model-len"
            )
        return size_bytes


def nearest_folder(folder: Path, what: str) -> Path:
    """Return a folder or its nearest existing parent. what: the flag and its value. Raises `ConfigError`."""
    try:
        return next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise inaccessible(what, error) from None


def inaccessible(what: str, error: OSError) -> ConfigError:
    """Return the error for a folder that cannot be accessed. what: the flag and its value."""
    return ConfigError(
        f"{what}: {error.filename} cannot be accessed ({error.strerror}): choose a writable folder"
    )


def check_folder(folder: Path, what: str) -> None:
    """Raise `ConfigError` unless the folder is, or can become, a writable folder of this user. what: see above."""
    existing = nearest_folder(folder, what)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{what}: {existing} must be a writable folder")
    complaint = ownership_error(existing.stat()) if existing == folder else None
    if complaint is not None:
        raise ConfigError(f"{what}: {folder} {complaint}")
