"""``quintet admin``: see and change the processes of a running server.

The command finds the server's run folder, puts its words into the supervisor's inbox and prints what comes back. What the
words mean is decided there.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quintet.deploy.cli import admin_kv
from quintet.deploy.supervisor import run_dirs
from quintet.process.runtime import CONFIG_FILE, SUPERVISOR
from quintet.process.sockets import Bus, Inbox, Peers, address_of
from quintet.wire.errors import ConfigError
from quintet.wire.supervision import Command, CommandAnswer

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

ANSWERS_S = 5.0
"""A supervisor that says nothing for so long at first is not well."""
LOOK_S = 0.5

_DESCRIPTION = """\
See and change the processes of a server that runs on this machine, under your user, while it serves. No request is lost.

  status                 who is there, since when, how much each has completed and has pending
  restart ROLE           new processes for frontend, tokenizer, detokenizer, executor or core.
                         Frontends, tokenizers and detokenizers: a new process first, then the old one gets nothing new,
                         finishes or hands over what it has, and leaves. Executor and core: the old process ends, the new one
                         takes its slot, and requests in flight pause until then.
  scale ROLE=COUNT …     so many frontends, tokenizers, detokenizers or engines (a core and its executor each) from now on;
                         up or down
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
  quintet admin restart frontend --drain-timeout 600     wait ten minutes for long answers before cutting them off
  quintet admin scale detokenizers=3 tokenizers=2
  quintet admin scale engines=3
  quintet admin --port 8001 status                       one of several servers
"""
    + admin_kv.EXAMPLES
    + """
`scale` holds until the server ends; the next `quintet serve` starts as many as its flags say.
Exit status: 0 when it was done; 1 when it was not, with the reason; 78 when there is no such server.
"""
)


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "admin",
        help="see and change the processes of a running server",
        description=_DESCRIPTION + admin_kv.DESCRIPTION,
        usage=_USAGE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", nargs="+", metavar="COMMAND", help="status, restart ROLE, scale ROLE=COUNT …, or kv …"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--port", type=int, help="which server, by its port (default: the only one)")
    chosen.add_argument("--run-dir", type=Path, metavar="DIR", help="which server, by its run folder")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        help="how long a process that leaves may finish what it has (default: the server's --drain-timeout)",
    )
    admin_kv.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and print the answers as they come."""
    words: list[str] = arguments.words
    if words[0] == "kv":
        found = find_server(Path(tempfile.gettempdir()), arguments.port, arguments.run_dir)
        return admin_kv.run(words[1:], arguments, found)
    if arguments.drain_timeout is not None:
        words = [*words, f"drain-timeout={arguments.drain_timeout:g}"]
    run_dir = find_server(Path(tempfile.gettempdir()), arguments.port, arguments.run_dir)
    return ask(run_dir, words)


class _Door(msgspec.Struct):
    port: int


class _Told(msgspec.Struct):
    """As much of a configuration as tells servers apart, whichever version wrote it."""

    frontend: _Door


def _port_in(config: Path) -> int | None:
    """Return the port of a server that runs, None of one that is just starting: the file comes right after the folder."""
    try:
        return msgspec.json.decode(config.read_bytes(), type=_Told).frontend.port
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def find_server(folder: Path, port: int | None, run_dir: Path | None) -> Path:
    """Return the run folder of the server that is meant, among those under ``folder``. Raises `ConfigError`."""
    if run_dir is not None:
        if not run_dirs.is_claimed(run_dir):
            raise ConfigError(f"--run-dir {run_dir} is not the run folder of a running server of yours")
        return run_dir
    read = {path: _port_in(path / CONFIG_FILE) for path in run_dirs.claimed(folder)}
    ports = {path: found for path, found in read.items() if found is not None}
    found = [path for path in ports if port is None or ports[path] == port]
    if len(found) == 1:
        return found[0]
    there = ", ".join(f"port {number} ({path})" for path, number in ports.items())
    if not ports:
        raise ConfigError(
            f"no server of yours runs with its run folder in {folder}; start one with `quintet serve`, or name the folder "
            "with --run-dir if its TMPDIR was another"
        )
    if not found:
        raise ConfigError(f"no server of yours listens on port {port}; there are: {there}")
    raise ConfigError(f"several servers run: {there}; choose one with --port or --run-dir")


def ask(run_dir: Path, words: list[str]) -> int:
    """Send the words, print the answers, and return the exit status."""
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
            print("quintet: the server ended meanwhile", file=sys.stderr)
            return 1
        if not has_answered and time.monotonic() > deadline:
            print(
                f"quintet: the supervisor does not answer within {ANSWERS_S:g} s; is it stopped, or the machine overloaded?",
                file=sys.stderr,
            )
            return 1
