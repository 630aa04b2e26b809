"""The servers behind the router: how each is, what it has to do, and which one a request goes to.

The choice is that of a frontend among engines (`quintet.frontend.router.choose`), by the same accounts: what was sent there and
what came of it, and the beginnings of prompts. What others send to a server is added from its figures.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from quintet.deploy.load_client.connection import Target
from quintet.deploy.router.asked import Asked
from quintet.deploy.router.lines import Lines
from quintet.frontend.beginnings import PIECE_TOKENS, Beginnings
from quintet.frontend.engines import USUAL_OVER
from quintet.frontend.router import Choice, Engine, choose
from quintet.wire.config import Routing

_log = logging.getLogger("quintet")


@dataclass(slots=True, eq=False)
class Server:
    """One of them, and what this router has there."""

    index: int
    url: str
    lines: Lines
    trouble: str = "not asked yet"
    """Why it gets nothing new; "" while it is well."""
    is_leaving: bool = False
    """Whether it was taken from the list: it finishes what it has."""
    is_stalled: bool = False
    """Whether it has work and makes no progress."""
    num_queued: int = 0
    """Prompt tokens of ours that it has not begun."""
    num_open: int = 0
    """Requests of ours that it answers."""
    num_others: int = 0
    """Requests that it had from others when it was last asked."""
    beginnings: Beginnings = field(default_factory=Beginnings)
    holds: set[Held] = field(default_factory=set)

    def note(self, trouble: str) -> None:
        """Note how it is: "" for well. What it had computed is forgotten when it goes."""
        if trouble == self.trouble:
            return
        if trouble and not self.trouble:
            self.beginnings.clear()
        _log.log(logging.WARNING if trouble else logging.INFO, "%s: %s", self.url, trouble or "is well")
        self.trouble = trouble


@dataclass(slots=True, eq=False)
class Held:
    """A request's account with a server, from when it was sent there until it left."""

    server: Server
    choice: Choice
    num_queued: int

    def begin(self) -> None:
        """The first of its answer has come."""
        self.server.num_queued -= self.num_queued
        self.num_queued = 0

    def leave(self) -> None:
        """It has ended, or goes elsewhere."""
        self.begin()
        self.server.num_open -= 1
        self.server.holds.discard(self)


class Servers:
    """All of them."""

    def __init__(self, policy: Routing) -> None:
        self._policy = policy
        self._all: list[Server] = []
        self._num_chosen = 0
        self._num_made = 0
        self._usual = 0.0

    def __iter__(self) -> Iterator[Server]:
        return iter(self._all)

    @property
    def usable(self) -> list[Server]:
        """Who gets requests now."""
        return [server for server in self._all if not (server.trouble or server.is_leaving)]

    def become(self, urls: Sequence[str], connect_s: float) -> None:
        """Have these servers from now on. Who is not among them any more gets nothing new, and leaves when it has nothing."""
        known = {server.url: server for server in self._all}
        for url in urls:
            if url in known:
                known[url].is_leaving = False
            else:
                self._all.append(Server(self._num_made, url, Lines(Target.parse(url), connect_s)))
                self._num_made += 1
        for url in known.keys() - set(urls):
            known[url].is_leaving = True

    def part(self) -> list[Server]:
        """Take out, and return, who was to leave and has nothing left to do."""
        gone = [server for server in self._all if server.is_leaving and not server.num_open]
        self._all = [server for server in self._all if server not in gone]
        return gone

    def choose(self, asked: Asked, without: Collection[Server]) -> Held | None:
        """Choose who answers a request, and count it there; None where nobody is left."""
        candidates = [server for server in self.usable if server not in without]
        if not candidates:
            return None
        self._num_chosen += 1
        engines = [_engine(server, asked) for server in candidates]
        session = asked.session or (str(asked.names[0]) if asked.names else "")
        usual = max(PIECE_TOKENS, self._usual) if self._num_chosen > USUAL_OVER // 4 else 0.0
        choice = choose(engines, self._policy, self._num_chosen, session, asked.num_tokens, usual)
        num_queued = max(0, asked.num_tokens - choice.num_cached)
        self._usual += (num_queued - self._usual) / min(self._num_chosen, USUAL_OVER)
        server = next(server for server in candidates if server.index == choice.index)
        server.beginnings.note(asked.names)
        return self.hold(server, choice, num_queued)

    def hold(self, server: Server, choice: Choice | None = None, num_queued: int = 0) -> Held:
        """Count a request at this server."""
        held = Held(server, choice or Choice(server.index, "it has the request"), num_queued)
        server.num_queued += num_queued
        server.num_open += 1
        server.holds.add(held)
        return held


def _engine(server: Server, asked: Asked) -> Engine:
    num_known, used = server.beginnings.find(asked.names)
    num_open = server.num_open + server.num_others
    return Engine(server.index, server.num_queued, num_open, PIECE_TOKENS * num_known, used, server.url)
