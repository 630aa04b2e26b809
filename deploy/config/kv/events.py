"""Configuration of KV cache events (``--kv-events-config``), in vLLM's format."""

from __future__ import annotations

import msgspec

from quintet.deploy.config.flags import Options
from quintet.wire.errors import ConfigError
from quintet.wire.kv_events import KvEventsConfig
from quintet.wire.kv_spec import KvSpec

FLAG = "--kv-events-config"


class _EventsJson(KvEventsConfig, forbid_unknown_fields=True, frozen=True, kw_only=True):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    max_queue_size: int = 100_000
    """Accepted and ignored: ``buffer_steps`` bounds the queue."""


def kv_events_config(options: Options, kv: KvSpec, *, has_prefix_cache: bool) -> KvEventsConfig | None:
    """Return the section, or None if events are disabled. Raises `ConfigError`."""
    if options.kv_events_config is None:
        return None
    try:
        parsed = msgspec.json.decode(options.kv_events_config, type=_EventsJson)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{FLAG} {options.kv_events_config}: {error}; write JSON such as"
            ' {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}'
        ) from None
    publisher = parsed.publisher or ("zmq" if parsed.enable_kv_cache_events else "null")
    if publisher not in ("zmq", "null"):
        raise ConfigError(f"{FLAG}: publisher is {publisher!r}; it must be zmq or null")
    if not parsed.enable_kv_cache_events or publisher == "null":
        return None
    if not has_prefix_cache:
        raise ConfigError(f"{FLAG} requires prefix caching, which is disabled: drop one of the two")
    if all(group.is_state for group in kv.groups):
        raise ConfigError(f"{FLAG}: this model has only recurrent states, and no KV blocks: drop it")
    for name, address in (("endpoint", parsed.endpoint), ("replay_endpoint", parsed.replay_endpoint)):
        if address is not None and not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"{FLAG}: {name} is {address!r}; write tcp://HOST:PORT or ipc://PATH")
        if address is not None and address.startswith("tcp://"):
            _check_port(name, address, options.data_parallel_size)
    for name, number in (("buffer_steps", parsed.buffer_steps), ("hwm", parsed.hwm)):
        if not 0 < number < 1 << 31:
            raise ConfigError(f"{FLAG}: {name} is {number}; it must be from 1 to 2147483647")
    return msgspec.convert(parsed, KvEventsConfig, from_attributes=True)


def _check_port(name: str, address: str, num_engines: int) -> None:
    """Validate a port, since ZeroMQ silently wraps invalid ones. Engine i uses port + i."""
    port = address.rpartition(":")[2]
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"{FLAG}: {name} is {address!r}; the port must be from 1 to 65535: write tcp://HOST:PORT"
        )
    if int(port) + num_engines > 1 << 16:
        raise ConfigError(
            f"{FLAG}: {name} is {address!r}, but the {num_engines} engines use consecutive ports:"
            f" the first must be at most {(1 << 16) - num_engines}"
        )
