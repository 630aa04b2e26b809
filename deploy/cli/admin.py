"""``quintet admin``: shows and changes the processes of a running server.

The command finds the server's run folder, sends its arguments to the supervisor's inbox, and prints the replies. The supervisor
interprets the arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

from quintet.deploy.cli import admin_kv
from quintet.deploy.supervisor import run_dirs
from quintet.process.child import CONFIG_FILE
from quintet.process.runtime import SUPERVISOR
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire.errors import ConfigError
from quintet.wire.supervision import Command, CommandAnswer

ANSWERS_S = 5.0
"""Timeout of the supervisor's first reply."""
LOOK_S = 0.5

_DESCRIPTION = """\
Show and change the processes of a running server of this user on this machine. No request is lost.

  status                 processes, with uptime, completed and pending requests
  restart ROLE           rolling restart of frontend, tokenizer, detokenizer, executor or core.
                         Frontends, tokenizers and detokenizers: the new process starts, then the old one is drained.
                         Executor and core: the old process stops, and requests pause until the new one is ready.
  scale ROLE=COUNT …     change the number of frontends, tokenizers, detokenizers or engines (a core and its executor each)
"""

_USAGE = """\
quintet admin [--port PORT | --run-dir DIR] [--drain-timeout SECONDS] status | restart ROLE | scale ROLE=COUNT …
       quintet admin [--port PORT | --run-dir DIR] kv list [--limit N] [--text]
       quintet admin [--port PORT | --run-dir DIR] kv pin | unpin | evict PREFIX | --prompt TEXT | --prompt-file FILE
       quintet admin [--port PORT | --run-dir DIR] kv export PREFIX FILE | export FILE --prompt TEXT | import FILE"""

_EXAMPLES = (
    """\
examples:
  quintet admin status
  quintet admin restart detokenizer
  quintet admin restart frontend --drain-timeout 600     wait up to ten minutes for long responses
  quintet admin scale detokenizers=3 tokenizers=2
  quintet admin scale engines=3
  quintet admin --port 8001 status                       one of several servers
"""
    + admin_kv.EXAMPLES
    + """
`scale` lasts until the server stops; the next `quintet serve` uses its flags again.
Exit status: 0 on success; 1 on failure, with the reason; 78 if there is no such server.
"""
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "admin",
        description=_DESCRIPTION + admin_kv.DESCRIPTION,
        usage=_USAGE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", nargs="+", metavar="COMMAND", help="status, restart ROLE, scale ROLE=COUNT …, or kv …"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--port", type=int, help="port of the server (default: the only server)")
    chosen.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder of the server")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        help="drain timeout of a stopped process (default: the server's --drain-timeout)",
    )
    admin_kv.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    words: list[str] = arguments.words
    run_dir = find_server(Path(tempfile.gettempdir()), arguments.port, arguments.run_dir)
    if words[0] == "kv":
        return admin_kv.run(words[1:], arguments, run_dir)
    if arguments.drain_timeout is not None:
        words = [*words, f"drain-timeout={arguments.drain_timeout:g}"]
    return ask(run_dir, words)


def _port_in(config: Path) -> int | None:
    """Return the port in a configuration file of any version; None if the server has not written it yet."""
    try:
        return int(json.loads(config.read_bytes())["frontend"]["port"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def find_server(folder: Path, port: int | None, run_dir: Path | None) -> Path:
    """Return the run folder of the selected server, among those in ``folder``. Raises `ConfigError`."""
    if run_dir is not None:
        if not run_dirs.is_claimed(run_dir):
            raise ConfigError(f"--run-dir {run_dir} is not the run folder of a running server of this user")
        return run_dir
    read = {path: _port_in(path / CONFIG_FILE) for path in run_dirs.claimed(folder)}
    ports = {path: found for path, found in read.items() if found is not None}
    found = [path for path in ports if port is None or ports[path] == port]
    if len(found) == 1:
        return found[0]
    running = ", ".join(f"port {number} ({path})" for path, number in ports.items())
    if not ports:
        raise ConfigError(
            f"no running server of this user has its run folder in {folder}; start one with `quintet serve`, or set --run-dir "
            "if the server uses another TMPDIR"
        )
    if not found:
        raise ConfigError(f"no server of this user listens on port {port}; running servers: {running}")
    raise ConfigError(f"several servers are running: {running}; choose one with --port or --run-dir")


def ask(run_dir: Path, words: list[str]) -> int:
    """Send the command, print the replies, and return the exit status."""
    bus = Bus(run_dir)
    address = f"ipc://{run_dir}/admin-{os.getpid()}-{secrets.token_hex(4)}"
    inbox = Inbox(bus, address, CommandAnswer)
    peers = Peers(bus)
    try:
        peers.connect(SUPERVISOR, address_of(run_dir, SUPERVISOR))
        peers.send(SUPERVISOR.role, SUPERVISOR.index, Command(address, words))
        return _listen(inbox, run_dir)
    finally:
        inbox.close()
        peers.close()
        bus.close()


def _listen(inbox: Inbox[CommandAnswer], run_dir: Path) -> int:
    deadline = time.monotonic() + ANSWERS_S
    has_answered = False
    while True:
        for answer in inbox.wait(LOOK_S):
            has_answered = True
            if answer.failed:
                print(f"quintet: {answer.line}", file=sys.stderr)
            elif answer.line:
                print(answer.line, flush=True)
            if answer.is_last:
                return 1 if answer.failed else 0
        if not run_dirs.is_claimed(run_dir):
            print("quintet: the server stopped", file=sys.stderr)
            return 1
        if not has_answered and time.monotonic() > deadline:
            print(
                f"quintet: no reply from the supervisor within {ANSWERS_S:g} s; it may be stopped, or the machine overloaded",
                file=sys.stderr,
            )
            return 1
