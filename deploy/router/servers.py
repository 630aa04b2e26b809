"""Servers of the router: health, load, and load balancing.

The choice is `quintet.frontend.load_balancing.load_balancer.choose`; load of other clients comes from the metrics.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median_low

from quintet.deploy.http_client.connection import Target
from quintet.deploy.http_client.pool import ConnectionPool
from quintet.deploy.router.candidate_index import CandidateIndex, Load
from quintet.deploy.router.request_summary import RequestSummary
from quintet.frontend.load_balancing.engine_speed import EngineSpeeds, LinearFit
from quintet.frontend.load_balancing.load_balancer import (
    MEAN_OVER,
    RUNNING_TOKENS,
    Candidate,
    EngineChoice,
    choose,
    fits_kv,
)
from quintet.frontend.load_balancing.prefix_affinity import (
    MAX_HASHES,
    PIECE_TOKENS,
    PrefixAffinity,
    PrefixOwners,
)
from quintet.wire.config import Routing

MAX_ALL_NAMES = 1 << 22  # prefix hashes remembered for all servers together
MAX_SESSIONS = 1 << 16  # sessions with a remembered server
REFRESH_EVERY = 64
"""Choices between two checks for requests of other clients."""
OTHERS_SHARE = 3
"""Servers count as shared if other clients have at least 1 / OTHERS_SHARE as many requests as this router."""
FETCHES, OFFERS = frozenset({"decode", "both"}), frozenset({"prefill", "both"})
"""Roles of servers that fetch a computed prompt (decode), and that compute it for others (prefill)."""
MAX_QUEUE_RATIO = 4
"""A prefill server may have a longer queue than the decode server, by at most this multiple of the prompt."""
_log = logging.getLogger("quintet")


@dataclass(slots=True, eq=False)
class Server:
    """State of one server, and of this router's requests on it."""

    index: int
    url: str
    pool: ConnectionPool
    trouble: str = "not polled yet"
    """Reason that the server gets no requests; "" if it is usable."""
    is_leaving: bool = False
    """Removed from the list; it finishes its open requests."""
    num_queued: int = 0
    """Queued prompt tokens of this router's requests."""
    num_open: int = 0
    """Open requests of this router."""
    num_others: int = 0
    """Requests of other clients at the last poll."""
    answers: Counter[str] = field(default_factory=Counter)
    """Number of answers by status."""
    num_kv_tokens: int = 0
    """Tokens of KV memory reserved for this router's requests."""
    num_kept_others: int = 0
    """Tokens of KV memory used by other clients at the last poll."""
    num_outputs: int = 0
    """Average output tokens per request; 0 if unknown."""
    prefixes: PrefixAffinity = field(default_factory=PrefixAffinity)
    speed: EngineSpeeds = field(default_factory=lambda: EngineSpeeds(LinearFit()))
    clock: Callable[[], float] = time.monotonic
    max_hashes: int = MAX_HASHES
    """Maximum remembered prefix hashes."""
    kv_tokens: int = 0
    """Capacity of its KV memory in tokens; 0 if unknown."""
    role: str = ""
    """Role in prefill-decode disaggregation; "" for none."""
    changed: Callable[[int], None] = lambda index: None
    """Called with the index when the load or the usability changes."""
    holds: set[HeldPrefixes] = field(default_factory=set)

    def set_trouble(self, trouble: str) -> None:
        """Set the server's trouble, "" for none. New trouble clears its cached prefixes and its speed."""
        if trouble == self.trouble:
            return
        if trouble and not self.trouble:
            self.prefixes.clear()
            self.speed.forget()
        _log.log(logging.WARNING if trouble else logging.INFO, "%s: %s", self.url, trouble or "ready")
        self.trouble = trouble
        self.changed(self.index)

    def add_load(self, num_open: int, num_queued: int, num_kv_tokens: int = 0) -> None:
        """Add to this router's open requests, queued prompt tokens and reserved KV tokens; negative values subtract."""
        self.num_open += num_open
        self.num_queued += num_queued
        self.num_kv_tokens += num_kv_tokens
        self.changed(self.index)

    @property
    def load(self) -> int:
        """Load in prompt tokens, as in `choose`."""
        return self.num_queued + RUNNING_TOKENS * (self.num_open + self.num_others)

    @property
    def kv_free(self) -> int | None:
        """Free tokens of its KV memory; None if the capacity is unknown."""
        return self.kv_tokens - self.num_kv_tokens - self.num_kept_others if self.kv_tokens else None

    def remember(self, max_hashes: int) -> None:
        """Limit the remembered prefix hashes to ``max_hashes`` and to the capacity of the KV memory."""
        self.max_hashes = max_hashes
        fitting = self.kv_tokens // PIECE_TOKENS
        self.prefixes.max_hashes = min(fitting or MAX_HASHES, max_hashes, MAX_HASHES)

    def update_load(
        self,
        num_running: int,
        num_waiting: int,
        before: Collection[HeldPrefixes] = (),
        kv_tokens: int = 0,
        kv_usage: float = 0.0,
        num_outputs: int = 0,
    ) -> None:
        """Update from the server's metrics. ``before``: this router's requests on it when the poll started."""
        if kv_tokens != self.kv_tokens:
            self.kv_tokens = kv_tokens
            self.remember(self.max_hashes)
        self.num_outputs = num_outputs
        self.num_others = max(0, num_running + num_waiting - len(before))
        num_ours = sum(held.num_kv_tokens for held in before if held.has_started)
        self.num_kept_others = max(0, int(kv_usage * kv_tokens) - num_ours)
        self.changed(self.index)
        if not num_waiting:
            for held in before:
                if held in self.holds:
                    held.begin()


@dataclass(slots=True, eq=False)
class HeldPrefixes:
    """Load of one request on a server, from the send to its end."""

    server: Server
    choice: EngineChoice
    num_queued: int
    num_kv_tokens: int = 0
    """Reserved tokens of KV memory."""
    num_before: int = 0
    """Tokens to compute before its first output, its prompt included, when it was sent; 0 to exclude it from the speed."""
    sent_s: float = 0.0
    has_started: bool = False

    def answer(self) -> None:
        """Record the first byte of its streamed answer."""
        if self.num_before:
            now_s = self.server.clock()
            self.server.speed.note(self.num_before, now_s - self.sent_s, now_s)
            self.server.changed(self.server.index)
            self.num_before = 0
        self.begin()

    def begin(self) -> None:
        """Record that its prompt is not queued."""
        self.has_started = True
        if self.num_queued:
            self.server.add_load(0, -self.num_queued)
            self.num_queued = 0

    def release(self) -> None:
        self.begin()
        self.server.add_load(-1, 0, -self.num_kv_tokens)
        self.server.holds.discard(self)


class Servers:
    def __init__(
        self,
        policy: Routing,
        rng: Random | None = None,
        pd_min_tokens: int = 0,
        others_share: int = OTHERS_SHARE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rng``: samples candidates. ``others_share``, ``pd_min_tokens`` (uncached prompt tokens): 0 disables."""
        self._policy = policy
        self._pd_min_tokens = pd_min_tokens
        self._others_share = others_share
        self._clock = clock
        self._usual_speed = LinearFit()
        self._num_outputs = 0
        """Median over the servers of the average output tokens."""
        self._prefill_servers: dict[int, Server] = {}
        """Prefill servers."""
        self._prefill_only: frozenset[int] = frozenset()
        """Servers with role prefill; they get other requests only if no other server is usable."""
        self._all: list[Server] = []
        self._by_index: dict[int, Server] = {}
        self._holders = PrefixOwners()
        self._candidate_index = CandidateIndex(self._load_of, rng or Random())
        self._num_chosen = 0
        self._num_created = 0
        self._usual = 0.0
        self._session_servers: dict[str, int] = {}
        """Server by session; cleared when the set of usable servers changes."""
        self._session_version = 0

    def __iter__(self) -> Iterator[Server]:
        return iter(self._all)

    @property
    def usable(self) -> list[Server]:
        """Servers that get requests."""
        return [server for server in self._all if not (server.trouble or server.is_leaving)]

    def set_urls(self, urls: Sequence[str], connect_s: float) -> None:
        """Replace the list of servers. Removed servers get no requests and are dropped once they are idle."""
        known = {server.url: server for server in self._all}
        for url in urls:
            if url in known:
                known[url].is_leaving = False
            else:
                self._add(url, connect_s)
        for url in known.keys() - set(urls):
            known[url].is_leaving = True
        for server in self._all:
            self._candidate_index.change(server.index)
            server.remember(MAX_ALL_NAMES // len(self._all))

    def _add(self, url: str, connect_s: float) -> None:
        index = self._num_created
        self._num_created += 1
        prefixes = PrefixAffinity(holders=self._holders, engine=index)
        pool = ConnectionPool(Target.parse(url), connect_s)
        speed, changed = EngineSpeeds(self._usual_speed), self._candidate_index.change
        server = Server(index, url, pool, prefixes=prefixes, speed=speed, clock=self._clock, changed=changed)
        self._by_index[index] = server
        self._all.append(server)

    def remove_idle(self) -> list[Server]:
        """Drop and return the removed servers without open requests."""
        idle = [server for server in self._all if server.is_leaving and not server.num_open]
        for server in idle:
            server.prefixes.clear()
            del self._by_index[server.index]
            self._candidate_index.change(server.index)
            self.note_role(server, "")
        self._all = [server for server in self._all if server not in idle]
        return idle

    def note_role(self, server: Server, role: str) -> None:
        if role == server.role:
            return
        server.role = role
        self._prefill_servers.pop(server.index, None)
        if role in OFFERS:
            self._prefill_servers[server.index] = server
        self._prefill_only = frozenset(
            i for i, each in self._prefill_servers.items() if each.role == "prefill"
        )

    def _load_of(self, index: int) -> Load | None:
        """Return a server's kind and load; None if it is not usable."""
        server = self._by_index.get(index)
        if server is None or server.trouble or server.is_leaving:
            return None
        is_full = self._policy == "prefix" and server.prefixes.is_full
        return (server.speed.slowness(self._clock()), is_full), server.load

    def choose(self, summary: RequestSummary, without: Collection[Server]) -> HeldPrefixes | None:
        """Choose a server for a request and count it there; None if no server is usable."""
        turn = self._num_chosen + 1
        session = summary.session or (str(summary.names[0]) if summary.names else "")
        left_out = {server.index for server in without}
        num_kv_tokens = summary.num_tokens + min(self._num_outputs, summary.max_outputs or self._num_outputs)
        pieces = self._candidates(summary, left_out | self._prefill_only, turn, session, num_kv_tokens)
        if not pieces and self._prefill_only:
            pieces = self._candidates(summary, left_out, turn, session, num_kv_tokens)
        if not pieces:
            return None
        self._num_chosen = turn
        engines = [self._engine(self._by_index[index], num) for index, num in pieces.items()]
        usual = max(PIECE_TOKENS, self._usual) if self._num_chosen > MEAN_OVER // 4 else 0.0
        choice = choose(engines, self._policy, turn, session, summary.num_tokens, usual, num_kv_tokens)
        num_queued = max(0, summary.num_tokens - choice.num_cached)
        self._usual += (num_queued - self._usual) / min(self._num_chosen, MEAN_OVER)
        if self._policy == "session" and session and not without:
            self._session_servers[session] = choice.index
        if turn % REFRESH_EVERY == 1:
            self._refresh()
        server = self._by_index[choice.index]
        server.prefixes.note(summary.names)
        num_before = server.load + num_queued if summary.is_streamed else 0
        held = self.hold(server, choice, num_queued, max(0, num_kv_tokens - choice.num_cached))
        held.num_before, held.sent_s = num_before, self._clock()
        return held

    def choose_for_prompt(self, summary: RequestSummary, held: HeldPrefixes) -> HeldPrefixes | None:
        """Choose a prefill server for a request held by its decode server, and count it there; None to prefill locally.

        The prompt is computed locally if it is short, if it would delay no other request, or if the prefill servers have
        much longer queues.
        """
        server, num_new = held.server, summary.num_tokens - held.choice.num_cached
        is_alone = server.num_open + server.num_others < 2
        if not self._pd_min_tokens or num_new < self._pd_min_tokens or is_alone or server.role not in FETCHES:
            return None
        most = server.num_queued - held.num_queued + MAX_QUEUE_RATIO * num_new
        others = {
            index: other
            for index, other in self._prefill_servers.items()
            if other is not server and not (other.trouble or other.is_leaving) and other.num_queued <= most
        }
        if not others:
            return None
        known = self._holders.of(summary.names)
        pieces = {index: next((n for n, have in known if index in have), 0) for index in others}
        engines = [self._engine(other, pieces[index]) for index, other in others.items()]
        choice = choose(
            engines, "prefix", self._num_chosen, "", summary.num_tokens, num_kv_tokens=summary.num_tokens
        )
        held.begin()  # the prompt is not queued on the decode server
        held.num_before = 0
        others[choice.index].prefixes.note(summary.names)
        num_new = max(0, summary.num_tokens - choice.num_cached)
        return self.hold(others[choice.index], choice, num_new, num_new)

    def _refresh(self) -> None:
        """Update the sampling of candidates and the average output length from all servers."""
        num_ours = sum(server.num_open for server in self._all)
        others = sum(server.num_others for server in self._all)
        self._candidate_index.is_sampling = self._others_share * others > num_ours
        lengths = [server.num_outputs for server in self._all if server.num_outputs]
        self._num_outputs = median_low(lengths) if lengths else 0  # the median tolerates a wrong server

    def _candidates(
        self, summary: RequestSummary, without: Collection[int], turn: int, session: str, num_kv_tokens: int
    ) -> dict[int, int]:
        """Return the candidate servers with their numbers of cached pieces of the prompt."""
        if self._policy in ("load", "prefix") or (self._policy == "session" and not session):
            saved_by_piece = PIECE_TOKENS if self._policy == "prefix" else 0

            def fits(index: int, num_pieces: int) -> bool:
                return fits_kv(self._by_index[index].kv_free, num_kv_tokens, saved_by_piece * num_pieces)

            known = self._holders.of(summary.names)
            fitting_only = self._candidate_index.candidates(known, without, turn, fits)
            return fitting_only or self._candidate_index.candidates(known, without, turn)
        if (home := self._session_server(session)) is not None and home not in without:
            return {home: 0}
        left = [index for index in self._candidate_index.usable_indexes() if index not in without]
        if self._policy == "round-robin" and left:
            left = [left[turn % len(left)]]
        return dict.fromkeys(left, 0)

    def _session_server(self, session: str) -> int | None:
        """Return the remembered server of a session; None if the set of usable servers has changed."""
        self._candidate_index.settle()
        if (
            self._session_version != self._candidate_index.num_moves
            or len(self._session_servers) > MAX_SESSIONS
        ):
            self._session_servers, self._session_version = {}, self._candidate_index.num_moves
        return self._session_servers.get(session)

    def hold(
        self, server: Server, choice: EngineChoice | None = None, num_queued: int = 0, num_kv_tokens: int = 0
    ) -> HeldPrefixes:
        held = HeldPrefixes(
            server, choice or EngineChoice(server.index, "has the request"), num_queued, num_kv_tokens
        )
        server.add_load(1, num_queued, num_kv_tokens)
        server.holds.add(held)
        return held

    def _engine(self, server: Server, num_pieces: int) -> Candidate:
        return Candidate(
            server.index,
            server.num_queued,
            server.num_open + server.num_others,
            PIECE_TOKENS * num_pieces,
            name=server.url,
            slowness=server.speed.slowness(self._clock()),
            kv_free=server.kv_free,
            is_full=server.prefixes.is_full,
        )
