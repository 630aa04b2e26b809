"""Admin operations on KV memory: list, pin, unpin, evict and export prefixes.

Pins and prefix paths are kept across executor restarts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from quintet.core.kv.pool import Pins
from quintet.core.kv.prefix import extend_chain, key_of, salt_digest
from quintet.core.kv.prefix_paths import Locations, PathPart, PrefixPath, PrefixPaths
from quintet.core.kv.prefix_tree import PrefixTree
from quintet.core.kv_services.prefix_export import FileTasks
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import ErrorCode, RequestError, invalid
from quintet.wire.kv_admin import MAX_LISTED_TOKENS, MIN_NAME, KvPrefix, KvQuery, KvReport, KvUsage
from quintet.wire.kv_tiers import KvPin, KvPins
from quintet.wire.messages import Failed

BLOCKS_PER_ITERATION = 1024
"""Blocks of memory and disk examined per loop iteration: a few milliseconds."""
MAX_PINNED_SHARE = 0.5
"""Maximum share of KV memory for pins; less if a request of full length would not fit in the rest."""


class KvAdmin:
    """Admin operations of one engine."""

    def __init__(self) -> None:
        self.pins = Pins()
        self.prefix_paths = PrefixPaths()
        self.files = FileTasks()
        self.has_changes = False
        """The executor's copy of the pins is out of date."""
        self.queries: deque[tuple[KvQuery, int]] = deque()
        """Pending queries and the index of their core; the tree for the first one is being built."""
        self._partial_tree: PrefixTree | None = None

    # --- executor restarts ---

    def begin(self, state: SchedulerState) -> None:
        """Attach to a state with a new pool; drop the newest pins that no longer fit."""
        self.files.fail_all()
        locations = Locations(state.pool, state.limits.groups)
        state.prefix_paths = self.prefix_paths
        self.prefix_paths.reach = locations.reach
        self.prefix_paths.block_size = locations.block_size
        self._partial_tree = None
        while len(self.pins.wanted) > _max_pinned(state.limits):
            state.pool.unpin(next(reversed(self.pins.by_digest)), None)
        self.has_changes = bool(self.pins.by_digest)

    def restore_pins(self, message: KvPins) -> None:
        """Restore the pins that an executor kept of a previous core, unless there are some."""
        if not self.pins.by_digest:
            for pin in message.pins:
                self.pins.add(pin)

    def take_changes(self) -> KvPins:
        """Return the pins, of which the executor's copy is then up to date."""
        self.has_changes = False
        return KvPins([*self.pins.by_digest.values()])

    # --- queries ---

    def take(self, query: KvQuery, core: int) -> None:
        """Queue a query; its report is in `FileTasks.done` in a later iteration."""
        self.queries.append((query, core))

    def advance(self, state: SchedulerState | None, now_ns: int) -> None:
        """Continue the first query; while requests are alive, only for a bounded time per iteration."""
        while self.queries:
            if state is not None:
                self._partial_tree = self._partial_tree or self._tree(state, now_ns)
                if not self._partial_tree.grow(BLOCKS_PER_ITERATION if state.live else None):
                    return
            query, core = self.queries.popleft()
            report = self.answer(state, query, core, now_ns)
            self._partial_tree = None
            if report is not None:
                self.files.done.append((query.frontend, report))

    def answer(self, state: SchedulerState | None, query: KvQuery, core: int, now_ns: int) -> KvReport | None:
        """Execute a query and return its report; None while a file must be written or read for it."""
        report = KvReport(query.query_id, core)
        try:
            if state is None:
                raise RequestError(ErrorCode.UNAVAILABLE, "The engine has no executor yet; retry shortly.")
            if not state.limits.prefix_caching:
                raise invalid(
                    "Prefix caching is off (--no-enable-prefix-caching, or a model that rotates long sequences "
                    "differently), so there are no prefixes."
                )
            self._do(state, query, report, now_ns)
            report.usage = self._usage(state)
        except RequestError as error:
            report.error = Failed(0, error.code, error.message, error.param)
            return report
        return None if query.verb in ("export", "import") else report

    def _do(self, state: SchedulerState, query: KvQuery, report: KvReport, now_ns: int) -> None:
        tree = self._partial_tree or self._tree(state, now_ns)
        locations = Locations(state.pool, state.limits.groups)
        tree.grow()
        if query.verb == "list":
            self._list(tree, locations, query, report, now_ns)
            return
        if query.verb == "import":
            self.files.begin_import(state, query, report)
            return
        if query.verb == "unpin" and not query.token_ids:
            digest = _only(query.name, self.pins.by_digest, "pinned prefix")
            path = tree.path(digest) or [digest]
        else:
            path = self._path(state, tree, query)
        if query.verb == "pin":
            path = self._pin(state, locations, path)
        report.prefixes.append(self._prefix(tree, locations, path, now_ns))
        if query.verb == "unpin":
            self._unpin(state, path[-1])
        elif query.verb == "evict":
            self._evict(state, tree, path)
        elif query.verb == "export":
            self.files.begin_export(state, query, report, _needed(state.limits, path))

    def _tree(self, state: SchedulerState, now_ns: int) -> PrefixTree:
        live = [
            PrefixPath([PathPart(request.kv.digests, None if request.embeds else request.tokens)], now_ns)
            for request in state.live.values()
        ]
        return PrefixTree([*live, *self.prefix_paths.newest_first()], self.prefix_paths.reach)

    def _list(
        self, tree: PrefixTree, locations: Locations, query: KvQuery, report: KvReport, now_ns: int
    ) -> None:
        ends, limit = tree.ends(), query.limit
        listed = list(dict.fromkeys((*self.pins.by_digest, *ends[:limit])))
        num_left = MAX_LISTED_TOKENS
        for digest in listed[:limit]:
            prefix = self._prefix(tree, locations, tree.path(digest) or [digest], now_ns)
            if query.with_tokens and num_left >= prefix.num_tokens:
                num_left -= prefix.num_tokens
                prefix.token_ids = tree.tokens(digest, locations.block_size)
            report.prefixes.append(prefix)
        report.num_prefixes = len(ends)

    def _prefix(self, tree: PrefixTree, locations: Locations, path: list[bytes], now_ns: int) -> KvPrefix:
        """Return the current location and pin state of a prefix."""
        digest = path[-1]
        pin, used_ns = self.pins.by_digest.get(digest), tree.used_ns(digest)
        counts = locations.counts(locations.keys(path) if pin is None else pin.keys)
        num_tokens = len(path) * locations.block_size if pin is None else pin.num_tokens
        idle_ns = None if used_ns is None else max(0, now_ns - used_ns)
        places = counts["device"], counts["host"], counts["disk"]
        return KvPrefix(digest, num_tokens, *places, pin is not None, idle_ns)

    def _path(self, state: SchedulerState, tree: PrefixTree, query: KvQuery) -> list[bytes]:
        """Return the digests of the prefix named in the query."""
        if not query.token_ids:
            digest = _only(query.name, {**tree.places, **self.pins.by_digest}, "prefix")
            path = tree.path(digest)
            if not path:
                words = f"No block of the prefix {query.name} is cached now; send its text or token ids."
                raise RequestError(ErrorCode.NOT_FOUND, words)
            return path
        block_size = state.limits.block_size
        tokens, digests = list(unpack_i32(query.token_ids)), list[bytes]()
        num_blocks = len(tokens) // block_size
        if not num_blocks:
            raise invalid(
                f"The prefix has {len(tokens)} tokens; only full blocks of {block_size} are cached. Send a longer prefix."
            )
        extend_chain(digests, salt_digest(query.salt), tokens, block_size, num_blocks)
        return digests

    # --- operations ---

    def _pin(self, state: SchedulerState, locations: Locations, path: list[bytes]) -> list[bytes]:
        """Pin a prefix; return the part that can be pinned."""
        limits, pool = state.limits, state.pool
        if limits.groups.states:
            # With states, the request that computes the prefix sets the checkpoints: only cached parts can be pinned.
            path = path[: locations.reach(path)]
            if not path:
                raise RequestError(
                    ErrorCode.NOT_FOUND,
                    "No block of the prefix is cached, and this model's states are checkpointed at some tokens only. "
                    "Send the prompt once, then pin it.",
                )
        pin = KvPin(path[-1], len(path) * limits.block_size, _needed(limits, path))
        if pin.digest in self.pins.by_digest:
            return path
        most, num_pinned, num_more = _max_pinned(limits), len(self.pins.wanted), self.pins.num_more(pin)
        if num_pinned + num_more > most:
            raise invalid(
                f"The prefix needs {num_more} blocks, and {num_pinned} are pinned; of {limits.num_blocks} blocks at most {most} "
                "may be pinned: half, and a request of full length must fit. Unpin another prefix, or start the server "
                "with a larger --kv-cache-memory or a smaller --max-model-len."
            )
        pool.pin(pin)
        self.has_changes = True
        return path

    def _unpin(self, state: SchedulerState, digest: bytes) -> None:
        if digest not in self.pins.by_digest:
            raise RequestError(ErrorCode.NOT_FOUND, f"The prefix {digest.hex()} is not pinned.")
        state.pool.unpin(digest, state.fence)
        self.has_changes = True

    def _evict(self, state: SchedulerState, tree: PrefixTree, path: list[bytes]) -> None:
        """Evict a prefix, all its continuations, and the part of it that no other prefix shares."""
        evicted = tree.following(path)
        for position in range(len(path) - 1, -1, -1):
            if position < len(path) - 1 and tree.num_next[path[position]] > 1:
                break
            evicted.add(path[position])
        pool = state.pool
        keys = [key_of(digest, group) for digest in evicted for group in range(len(state.limits.groups.all))]
        if any(key in self.pins.wanted for key in keys):
            raise invalid("The prefix or a continuation of it is pinned; unpin it first.")
        blocks = [pool.index.block_of[key] for key in keys if key in pool.index.block_of]
        for block in blocks + pool.index.blocks_of_ends(evicted):
            pool.evict(block)
        for tier in pool.tiers.remote:
            for key in keys:
                tier.drop(key)

    def _usage(self, state: SchedulerState) -> KvUsage:
        limits, pool = state.limits, state.pool
        return KvUsage(
            limits.block_bytes,
            limits.block_size,
            limits.num_blocks,
            len(pool.index.block_of),
            len(self.pins.wanted),
            _max_pinned(limits),
            sum(tier.capacity.num_places for tier in pool.tiers.remote),
            sum(len(tier.held) for tier in pool.tiers.remote),
        )


def _needed(limits: Limits, path: list[bytes]) -> list[bytes]:
    """Return the keys that a request needs to continue after a prefix."""
    keys: list[bytes] = []
    for index, group in enumerate(limits.groups.all):
        first = (
            len(path) - 1
            if group.is_state
            else limits.groups.first_block(index, len(path) * limits.block_size)
        )
        keys += (key_of(digest, index) for digest in path[first:])
    return keys


def _max_pinned(limits: Limits) -> int:
    groups = limits.groups
    longest = groups.spec.most_blocks(limits.max_request_len, groups.step_tokens)
    return max(0, min(int(limits.num_blocks * MAX_PINNED_SHARE), limits.num_blocks - longest))


def _only(name: str, known: Collection[bytes], what: str) -> bytes:
    """Return the one digest with this name prefix. Raises `RequestError`."""
    if len(name) < MIN_NAME:
        raise invalid(f"{name!r} is too short for a prefix name; send at least {MIN_NAME} digits.")
    begin = bytes.fromhex(name[: len(name) // 2 * 2])
    found = [digest for digest in known if digest.startswith(begin) and digest.hex().startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise invalid(f"{len(found)} prefixes have names that begin with {name}; send more digits.")
    raise RequestError(ErrorCode.NOT_FOUND, f"No {what} has a name that begins with {name}.")
