"""``quintet admin kv``: lists, pins, evicts, exports and imports cached prefixes of a running server.

Sends requests to the server's ``/kv`` endpoints, with the operator key derived from its run folder.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec

from quintet.deploy.config.memory import format_size
from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ask
from quintet.deploy.supervisor.admin_server import duration
from quintet.frontend.http.auth import operator_keys
from quintet.process.child import CONFIG_FILE
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.kv_tiers import EXCHANGE

WAIT_S = 620.0
"""Response timeout."""
VERBS = ("pin", "unpin", "evict")

DESCRIPTION = """\
  kv list                cached prefixes, most recently used first: id, length, location of blocks
  kv pin PREFIX          pin a prefix: it is not evicted from memory or disk
  kv unpin PREFIX        unpin a prefix
  kv evict PREFIX        evict a prefix and all its continuations
  kv export PREFIX FILE  write the disk blocks of a prefix to a file (requires --kv-disk)
  kv import FILE         import an exported file; model, data types, version and processor must be the same
                         PREFIX: an id of the list, at least eight digits; or --prompt TEXT, or --prompt-file FILE
"""
EXAMPLES = """\
  quintet admin kv list --limit 20
  quintet admin kv list --text                           also show known prompts (private data)
  quintet admin kv pin --prompt-file system-prompt.txt   also before the first request
  quintet admin kv unpin 5f0c31a7
  quintet admin kv evict 5f0c31a7
  quintet admin kv export 5f0c31a7 system-prompt.kv      then on another server: quintet admin kv import system-prompt.kv
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("kv")
    group.add_argument(
        "--limit", type=int, default=20, help="maximum number of listed prefixes (default: 20)"
    )
    group.add_argument("--text", action="store_true", help="also list prompts")
    given = group.add_mutually_exclusive_group()
    given.add_argument("--prompt", metavar="TEXT", help="prefix as text, as in a completion request")
    given.add_argument("--prompt-file", type=Path, metavar="FILE", help="file with the prefix as text")
    group.add_argument("--cache-salt", default="", metavar="SALT", help="cache_salt of the requests")


def run(words: list[str], arguments: argparse.Namespace, run_dir: Path) -> int:
    """Run a ``kv`` command on the server of a run folder, print the response, and return the exit status.

    Raises `ConfigError` for an invalid command.
    """
    config = EngineConfig.read(run_dir / CONFIG_FILE)
    if not config.processes.frontends:
        raise ConfigError(
            "this server has no HTTP frontends, and so no /kv endpoints: a Python program is its frontend"
        )
    try:
        _run(words, arguments, config)
    except AdminRefusal as refused:
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
            _print_changed(verb, _ask(config, "POST", f"/kv/{verb}", _prompt_of(arguments)))
        case [verb, name] if verb in VERBS:
            _print_changed(verb, _ask(config, "POST", f"/kv/{verb}", {"id": name}))
        case ["export", *name, file] if len(name) <= 1:
            _export(config, {"id": name[0]} if name else _prompt_of(arguments), Path(file))
        case ["import", file]:
            _import(config, Path(file))
        case _:
            raise ConfigError(
                f"'kv {' '.join(words)}' is not a command; use `kv list`, `kv pin|unpin|evict PREFIX`,"
                " `kv export PREFIX FILE` and `kv import FILE`"
            )


def _exchange(config: EngineConfig) -> Path:
    if config.cache.disk is None:
        raise AdminRefusal("export and import require --kv-disk: start the server with it")
    return Path(config.cache.disk.folder) / EXCHANGE


def _export(config: EngineConfig, prefix: dict[str, object], file: Path) -> None:
    """Let the server write the file to its exchange folder, and move it."""
    _exchange(config)
    if file.exists():
        raise AdminRefusal(f"{file} already exists: remove it, or choose another name")
    name = f"admin-{secrets.token_hex(8)}"
    answer = _ask(config, "POST", "/kv/export", {**prefix, "file": name})
    try:
        shutil.move(answer["file"], file)
    except OSError as error:
        raise AdminRefusal(
            f"{answer['file']} was written, but cannot be moved to {file}: {error.strerror}"
        ) from None
    for each in answer["data"]:
        print(f"exported: {_line(each)}")
    print(f"{file}: {format_size(answer['bytes'])}")


def _import(config: EngineConfig, file: Path) -> None:
    """Copy the file to the server's exchange folder while the server reads it."""
    copy = _exchange(config) / f"admin-{secrets.token_hex(8)}"
    try:
        copy.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            shutil.copyfile(file, copy)
        except OSError as error:
            raise AdminRefusal(f"{file} cannot be copied to {copy.parent}: {error.strerror}") from None
        answer = _ask(config, "POST", "/kv/import", {"file": copy.name})
    finally:
        copy.unlink(missing_ok=True)
    for engine in answer["data"]:
        print(
            f"engine {engine['engine']}: {engine['imported']} blocks imported, {engine['known']} already present,"
            f" {engine['damaged']} damaged"
        )
    _print_errors(answer)


def _prompt_of(arguments: argparse.Namespace) -> dict[str, object]:
    text = arguments.prompt
    if arguments.prompt_file is not None:
        try:
            text = arguments.prompt_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file {arguments.prompt_file}: {error}") from None
    if text is None:
        raise ConfigError("no prefix given: give an id from `quintet admin kv list`, or --prompt TEXT")
    return {"prompt": text, "cache_salt": arguments.cache_salt}


class AdminRefusal(Exception):
    """The server rejected the request; the message contains the reason."""


def _target(config: EngineConfig) -> Target:
    frontend = config.frontend
    if frontend.ssl_ca_certs:
        raise ConfigError(
            "this server requires client certificates: use its /kv endpoints with a certificate and the --admin-key"
        )
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(frontend.host, frontend.host)
    headers = (("Authorization", f"Bearer {operator_keys(config)[0]}"),)
    certificate = "" if frontend.uds else frontend.ssl_certfile
    return Target(host, frontend.port, bool(certificate), "", headers, frontend.uds, certificate)


def _ask(config: EngineConfig, method: str, path: str, body: object = None) -> dict[str, Any]:
    """Return the server's response. Raises `AdminRefusal` with its error message, or `ConfigError` without a response."""
    try:
        response = ask(_target(config), method, path, body, WAIT_S)
        answer: dict[str, Any] = msgspec.json.decode(response.body)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"no response from the server at {path}: {error}") from None
    if response.status != 200:
        raise AdminRefusal(str(answer.get("error", {}).get("message", answer)))
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
    done = {"pin": "pinned", "unpin": "unpinned", "evict": "evicted"}[verb]
    for prefix in answer["data"]:
        print(f"{done}: {_line(prefix)}")
    _print_errors(answer)


def _print_errors(answer: dict[str, Any]) -> None:
    for error in answer["errors"]:
        print(f"engine {error['engine']}: {error['message']}", file=sys.stderr)
