"""``quintet admin kv``: what a running server has in KV memory, and what is to stay or to go.

Speaks to the server's own ``/kv`` over HTTP, with the key that follows from its run folder: what is asked for is decided there.
"""

from __future__ import annotations

import argparse
import http.client
import secrets
import shutil
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import msgspec

from quintet.deploy.config.memory import format_size
from quintet.deploy.supervisor.commands import duration
from quintet.frontend.http.auth import operator_keys
from quintet.process.runtime import CONFIG_FILE
from quintet.wire.config import EngineConfig, FrontendConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_disk import EXCHANGE

WAIT_S = 620.0
"""For an answer."""
VERBS = ("pin", "unpin", "evict")

DESCRIPTION = """\
  kv list                prefixes in KV memory, used last first: their names, how long they are, where their blocks are
  kv pin PREFIX          keep a prefix: neither memory nor disk gives it away, whoever else comes
  kv unpin PREFIX        keep it no longer
  kv evict PREFIX        forget a prefix and all that begins with it
  kv export PREFIX FILE  write what the disk has of a prefix into a file (with --kv-disk)
  kv import FILE         have what is in it at this server, which computes the same bits: same model, formats, version, processor
                         PREFIX: a name from the list, eight digits of it or more; or --prompt TEXT, or --prompt-file FILE
"""
EXAMPLES = """\
  quintet admin kv list --limit 20
  quintet admin kv list --text                           with the prompts, as far as they are known: they are private
  quintet admin kv pin --prompt-file system-prompt.txt   before anybody sent it, too
  quintet admin kv unpin 5f0c31a7
  quintet admin kv evict 5f0c31a7
  quintet admin kv export 5f0c31a7 system-prompt.kv      then, at another server: quintet admin kv import system-prompt.kv
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what only these commands take."""
    group = parser.add_argument_group("of kv")
    group.add_argument("--limit", type=int, default=20, help="prefixes to list at most (default: 20)")
    group.add_argument("--text", action="store_true", help="list the prompts too")
    given = group.add_mutually_exclusive_group()
    given.add_argument(
        "--prompt", metavar="TEXT", help="the text that the prefix is, as completions are sent it"
    )
    given.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file with it")
    group.add_argument("--cache-salt", default="", metavar="SALT", help="of the requests that begin so")


def run(words: list[str], arguments: argparse.Namespace, run_dir: Path) -> int:
    """Do what the words say at the server with this run folder, print what it answers, and return the exit status.

    Raises `ConfigError` for words that make no sense.
    """
    config = EngineConfig.read(run_dir / CONFIG_FILE)
    if not config.processes.frontends:
        raise ConfigError(
            "this server has no frontends of its own: a Python program is its frontend, and there is no /kv"
        )
    try:
        _run(words, arguments, config)
    except Refused as refused:
        print(f"quintet: {refused}", file=sys.stderr)
        return 1
    return 0


def _run(words: list[str], arguments: argparse.Namespace, config: EngineConfig) -> None:
    match words:
        case ["list"]:
            text = "&text=true" if arguments.text else ""
            answer = _ask(config, "GET", f"/kv?limit={arguments.limit}{text}")
            _print_listing(answer)
        case [verb] if verb in VERBS:
            _print_changed(verb, _ask(config, "POST", f"/kv/{verb}", _given(arguments)))
        case [verb, name] if verb in VERBS:
            _print_changed(verb, _ask(config, "POST", f"/kv/{verb}", {"id": name}))
        case ["export", *name, file] if len(name) <= 1:
            _export(config, {"id": name[0]} if name else _given(arguments), Path(file))
        case ["import", file]:
            _import(config, Path(file))
        case _:
            raise ConfigError(
                f"'kv {' '.join(words)}' is not a command; there are `kv list`, `kv pin|unpin|evict PREFIX`,"
                " `kv export PREFIX FILE` and `kv import FILE`"
            )


def _exchange(config: EngineConfig) -> Path:
    if config.cache.disk is None:
        raise Refused(
            "prefixes go into files and come from there by way of --kv-disk: start the server with it"
        )
    return Path(config.cache.disk.folder) / EXCHANGE


def _export(config: EngineConfig, prefix: dict[str, object], file: Path) -> None:
    """Have the server write the file in its own folder, and take it from there."""
    _exchange(config)
    if file.exists():
        raise Refused(f"{file} is there already: remove it, or give another name")
    name = f"admin-{secrets.token_hex(8)}"
    answer = _ask(config, "POST", "/kv/export", {**prefix, "file": name})
    try:
        shutil.move(answer["file"], file)
    except OSError as error:
        raise Refused(
            f"{answer['file']} was written, and cannot be moved to {file}: {error.strerror}"
        ) from None
    for each in answer["data"]:
        print(f"exported: {_line(each)}")
    print(f"{file}: {format_size(answer['bytes'])}")


def _import(config: EngineConfig, file: Path) -> None:
    """Lay the file, or a copy, into the server's own folder while it is read."""
    laid = _exchange(config) / f"admin-{secrets.token_hex(8)}"
    try:
        laid.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            shutil.copyfile(file, laid)
        except OSError as error:
            raise Refused(f"{file} cannot be read, or laid into {laid.parent}: {error.strerror}") from None
        answer = _ask(config, "POST", "/kv/import", {"file": laid.name})
    finally:
        laid.unlink(missing_ok=True)
    for engine in answer["data"]:
        print(
            f"engine {engine['engine']}: {engine['imported']} blocks imported, {engine['known']} were there,"
            f" {engine['damaged']} were damaged"
        )
    _print_errors(answer)


def _given(arguments: argparse.Namespace) -> dict[str, object]:
    text = arguments.prompt
    if arguments.prompt_file is not None:
        try:
            text = arguments.prompt_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {arguments.prompt_file}: {error}") from None
    if text is None:
        raise ConfigError("which prefix? Give its name from `quintet admin kv list`, or --prompt TEXT")
    return {"prompt": text, "cache_salt": arguments.cache_salt}


class Refused(Exception):
    """The server does not do what was asked; the message says why."""


class _Unix(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connect(config: FrontendConfig) -> http.client.HTTPConnection:
    if config.ssl_ca_certs:
        raise ConfigError(
            "this server asks clients for certificates: ask its /kv with yours, and the key of --admin-key"
        )
    if config.uds:
        return _Unix(config.uds, WAIT_S)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    if config.ssl_certfile:
        context = ssl.create_default_context(cafile=config.ssl_certfile)  # that one, whatever its name is
        context.check_hostname = False
        return http.client.HTTPSConnection(host, config.port, timeout=WAIT_S, context=context)
    return http.client.HTTPConnection(host, config.port, timeout=WAIT_S)


def _ask(config: EngineConfig, method: str, path: str, body: object = None) -> dict[str, Any]:
    """Return the server's answer. Raises `Refused` with its words, or `ConfigError` where there is no answer."""
    connection = _connect(config.frontend)
    headers = {"Authorization": f"Bearer {operator_keys(config)[0]}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
        response = connection.getresponse()
        answer: dict[str, Any] = msgspec.json.decode(response.read())
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise ConfigError(f"the server does not answer at {path}: {error}") from None
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise Refused(str(answer.get("error", {}).get("message", answer)))
    return answer


def _print_listing(answer: dict[str, Any]) -> None:
    for engine in answer["engines"]:
        parts = [
            f"{engine['prefixes']} prefixes in {engine['blocks_cached']} of {engine['blocks']} blocks",
            f"{engine['block_tokens']} tokens a block",
            f"{engine['blocks_pinned']} pinned of at most {engine['blocks_pinned_at_most']}",
        ]
        if engine["disk_blocks"]:
            parts.append(f"{engine['disk_blocks_held']} of {engine['disk_blocks']} on disk")
        print(f"engine {engine['engine']}: {', '.join(parts)}")
    for prefix in answer["data"]:
        print(_line(prefix))
        if prefix.get("text") is not None:
            print(f"    {prefix['text']!r}")
    _print_errors(answer)


def _line(prefix: dict[str, Any]) -> str:
    where = ", ".join(f"{count} {place}" for place, count in prefix["blocks"].items() if count) or "none"
    used = "-" if prefix["last_used_s"] is None else f"{duration(prefix['last_used_s'])} ago"
    pinned = "  pinned" if prefix["pinned"] else ""
    return (
        f"{prefix['id'][:16]}  engine {prefix['engine']}  {prefix['tokens']} tokens  blocks: {where}"
        f"  {format_size(prefix['bytes'])}  used {used}{pinned}"
    )


def _print_changed(verb: str, answer: dict[str, Any]) -> None:
    done = {"pin": "pinned", "unpin": "not pinned any more", "evict": "evicted"}[verb]
    for prefix in answer["data"]:
        print(f"{done}: {_line(prefix)}")
    _print_errors(answer)


def _print_errors(answer: dict[str, Any]) -> None:
    for error in answer["errors"]:
        print(f"engine {error['engine']}: {error['message']}", file=sys.stderr)
