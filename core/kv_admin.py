"""Where operators ask of KV memory: which prefixes there are, and which are to stay or to go.

Reads what the pool, its tiers and the trails know, and tells them what was decided. Keeps pins and trails while executors come
and go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Mapping, Sequence

from quintet.core.kv.pins import Pin, Pins
from quintet.core.kv.prefix import extend_chain, key_of, reach, salt_digest
from quintet.core.kv.prefix_tree import PrefixPath, PrefixPaths, PrefixTree
from quintet.core.prefix_export import FileTasks
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.wire.codec import unpack_i32
from quintet.wire.errors import ErrorCode, RequestError
from quintet.wire.kv_admin import (
    MAX_LISTED,
    MAX_LISTED_TOKENS,
    MIN_NAME,
    KvPin,
    KvPins,
    KvPrefix,
    KvQuery,
    KvReport,
    KvUsage,
)
from quintet.wire.messages import Failed

BLOCKS_A_TURN = 1024
"""Of KV memory and disk, that are looked at in a turn of the core: some milliseconds."""
MOST_PINNED = 0.5
"""Share of KV memory that pins may take; less where a request of full length would not fit beside them."""


class KvAdmin:
    """One engine's."""

    def __init__(self) -> None:
        self.pins = Pins()
        self.trails = PrefixPaths()
        self.files = FileTasks()
        self.has_news = False
        """Whether the executor does not know the pins as they are now."""
        self._asked: deque[tuple[KvQuery, int]] = deque()
        """Questions, and whose core they are to: the first one's tree grows."""
        self._growing: PrefixTree | None = None

    # --- executors come and go ---

    def begin(self, state: SchedulerState) -> None:
        """Follow a state whose pool is new; drop the newest pins that it has no room for."""
        self.files.fail_all()
        shown = _Shown(state)
        state.trails, self.trails.reach, self.trails.block_size = self.trails, shown.reach, shown.block_size
        self._growing = None
        while len(self.pins.wanted) > _most_pinned(state.limits):
            state.pool.unpin(next(reversed(self.pins.by_digest)), None)
        self.has_news = bool(self.pins.by_digest)

    def hear(self, message: KvPins) -> None:
        """Take the pins that an executor kept of a core that is gone, unless there are some."""
        if not self.pins.by_digest:
            for pin in message.pins:
                self.pins.add(Pin(pin.digest, pin.num_tokens, tuple(pin.keys)))

    def take_news(self) -> KvPins | None:
        """Return the pins, if they changed since the last call."""
        if not self.has_news:
            return None
        self.has_news = False
        return KvPins(
            [KvPin(pin.digest, pin.num_tokens, list(pin.keys)) for pin in self.pins.by_digest.values()]
        )

    # --- questions ---

    def take(self, query: KvQuery, core: int) -> None:
        """Hear what is asked; what became of it is told by `FileTasks.take_done`, in one of the next turns."""
        self._asked.append((query, core))

    def go_on(self, state: SchedulerState | None, now_ns: int) -> None:
        """Answer the first question, or get nearer to that: while there are requests, no more of it than a step bears."""
        while self._asked:
            if state is not None and not self._grow(state, now_ns):
                return
            query, core = self._asked.popleft()
            report = self.answer(state, query, core, now_ns)
            self._growing = None
            if report is not None:
                self.files.tell(query, report)

    def _grow(self, state: SchedulerState, now_ns: int) -> bool:
        """Return whether the tree for the first question is all there."""
        if self._growing is None:
            self._growing = self._tree(state, now_ns)
        return self._growing.grow(BLOCKS_A_TURN if state.live else None)

    def answer(self, state: SchedulerState | None, query: KvQuery, core: int, now_ns: int) -> KvReport | None:
        """Do what is asked, and say what became of it; None where a file has to be written or read for that."""
        report = KvReport(query.query_id, core)
        try:
            if state is None:
                raise RequestError(
                    ErrorCode.UNAVAILABLE, "The engine has no executor yet; try again shortly."
                )
            if not state.limits.prefix_caching:
                raise RequestError(
                    ErrorCode.INVALID,
                    "There are no prefixes: prefix caching is off (--no-enable-prefix-caching, or a model that rotates long "
                    "sequences otherwise).",
                )
            self._do(state, query, report, now_ns)
            report.room = self._room(state)
        except RequestError as error:
            report.error = Failed(0, error.code, error.message, error.param)
            return report
        return None if query.verb in ("export", "import") else report

    def _do(self, state: SchedulerState, query: KvQuery, report: KvReport, now_ns: int) -> None:
        tree, shown = self._growing or self._tree(state, now_ns), _Shown(state)
        tree.grow()
        if query.verb == "list":
            self._list(tree, shown, query, report, now_ns)
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
            path = self._pin(state, shown, path)
        report.prefixes.append(self._prefix(tree, shown, path, now_ns))
        if query.verb == "unpin":
            self._unpin(state, path[-1])
        elif query.verb == "evict":
            self._evict(state, tree, path)
        elif query.verb == "export":
            self.files.begin_export(state, query, report, _needed(state.limits, path))

    def _tree(self, state: SchedulerState, now_ns: int) -> PrefixTree:
        return self.trails.tree(
            PrefixPath(request.digests, request.tokens if request.embeds is None else None, now_ns)
            for request in state.live.values()
        )

    def _list(self, tree: PrefixTree, shown: _Shown, query: KvQuery, report: KvReport, now_ns: int) -> None:
        ends, limit = tree.ends(), min(query.limit, MAX_LISTED)
        listed = list(dict.fromkeys((*self.pins.by_digest, *ends[:limit])))
        num_left = MAX_LISTED_TOKENS
        for digest in listed[:limit]:
            prefix = self._prefix(tree, shown, tree.path(digest) or [digest], now_ns)
            if query.with_tokens and num_left >= prefix.num_tokens:
                num_left -= prefix.num_tokens
                prefix.token_ids = tree.tokens(digest, shown.block_size)
            report.prefixes.append(prefix)
        report.num_prefixes = len(ends)

    def _prefix(self, tree: PrefixTree, shown: _Shown, path: list[bytes], now_ns: int) -> KvPrefix:
        """Return what there is of a prefix."""
        digest = path[-1]
        pin, used_ns = self.pins.by_digest.get(digest), tree.used_ns(digest)
        device, host, disk = shown.counts(shown.keys(path) if pin is None else pin.keys)
        num_tokens = len(path) * shown.block_size if pin is None else pin.num_tokens
        idle_ns = None if used_ns is None else max(0, now_ns - used_ns)
        return KvPrefix(digest, num_tokens, device, host, disk, pin is not None, idle_ns)

    def _path(self, state: SchedulerState, tree: PrefixTree, query: KvQuery) -> list[bytes]:
        """Return the digests of the prefix that is asked of."""
        if not query.token_ids:
            digest = _only(query.name, {**tree.places, **self.pins.by_digest}, "prefix")
            path = tree.path(digest)
            if not path:
                words = f"Of the prefix {query.name} nothing is held now; give its text or token ids."
                raise RequestError(ErrorCode.NOT_FOUND, words)
            return path
        block_size = state.limits.block_size
        tokens, digests = list(unpack_i32(query.token_ids)), list[bytes]()
        num_blocks = len(tokens) // block_size
        if not num_blocks:
            raise RequestError(
                ErrorCode.INVALID,
                f"The prefix has {len(tokens)} tokens; what is kept are full blocks of {block_size}. Give a longer one.",
            )
        extend_chain(digests, salt_digest(query.salt), tokens, block_size, num_blocks)
        return digests

    # --- verbs ---

    def _pin(self, state: SchedulerState, shown: _Shown, path: list[bytes]) -> list[bytes]:
        """Keep a prefix; return as much of it as can be kept."""
        limits, pool = state.limits, state.pool
        if limits.groups.states:
            # Where states are kept, who computes the prefix decides: only what is there can be kept.
            path = path[: shown.reach(path)]
            if not path:
                raise RequestError(
                    ErrorCode.NOT_FOUND,
                    "Nothing of the prefix is held, and this model's layers keep states, which are kept behind some tokens only. "
                    "Send the prompt once, and pin it then.",
                )
        pin = Pin(path[-1], len(path) * limits.block_size, tuple(_needed(limits, path)))
        if pin.digest in self.pins.by_digest:
            return path
        most, num_pinned, num_more = _most_pinned(limits), len(self.pins.wanted), self.pins.num_more(pin)
        if num_pinned + num_more > most:
            raise RequestError(
                ErrorCode.INVALID,
                f"The prefix takes {num_more} blocks beside {num_pinned} that are pinned; of {limits.num_blocks} at most {most} "
                "may be: half, and no more than leave room for a request of full length. Unpin another, or start the server "
                "with a larger --kv-cache-memory or a smaller --max-model-len.",
            )
        pool.pin(pin)
        self.has_news = True
        return path

    def _unpin(self, state: SchedulerState, digest: bytes) -> None:
        if digest not in self.pins.by_digest:
            raise RequestError(ErrorCode.NOT_FOUND, f"The prefix {digest.hex()} is not pinned.")
        state.pool.unpin(digest, state.fence)
        self.has_news = True

    def _evict(self, state: SchedulerState, tree: PrefixTree, path: list[bytes]) -> None:
        """Forget a prefix, all that begins with it, and of it what nothing else begins with."""
        going = tree.following(path)
        for position in range(len(path) - 1, -1, -1):
            if position < len(path) - 1 and tree.num_next(path[position]) > 1:
                break
            going.add(path[position])
        pool, disk = state.pool, state.pool.tiers.disk
        keys = [key_of(digest, group) for digest in going for group in range(len(state.limits.groups.all))]
        if any(key in self.pins.wanted for key in keys):
            raise RequestError(
                ErrorCode.INVALID, "The prefix, or one that begins with it, is pinned: unpin that first."
            )
        blocks = [pool.index.block_of[key] for key in keys if key in pool.index.block_of]
        for block in blocks + pool.index.blocks_of_ends(going):
            pool.evict(block)
        if disk is not None:
            for key in keys:
                disk.drop(key)

    def _room(self, state: SchedulerState) -> KvUsage:
        limits, pool = state.limits, state.pool
        disk = pool.tiers.disk
        return KvUsage(
            limits.block_bytes,
            limits.block_size,
            limits.num_blocks,
            len(pool.index.block_of),
            len(self.pins.wanted),
            _most_pinned(limits),
            0 if disk is None else disk.num_places,
            0 if disk is None else len(disk.place_of),
        )


class _Shown:
    """Where contents are."""

    def __init__(self, state: SchedulerState) -> None:
        tiers, limits = state.pool.tiers, state.limits
        nowhere: Mapping[bytes, int] = {}
        self._groups = limits.groups.all
        self.block_size = limits.block_size
        self._places = (
            state.pool.index.block_of,
            tiers.host.block_of,
            nowhere if tiers.disk is None else tiers.disk.place_of,
        )
        self._known: Container[bytes] = (
            _Union(self._places) if tiers.disk or tiers.host.num_blocks else self._places[0]
        )

    def reach(self, path: list[bytes]) -> int:
        """Return behind how many blocks of a prefix a request can begin."""
        return reach(self._known, path, len(path), self._groups, self.block_size)

    def keys(self, path: list[bytes]) -> list[bytes]:
        """Return what names the contents of these blocks."""
        return [key_of(digest, group) for digest in path for group in range(len(self._groups))]

    def counts(self, keys: Sequence[bytes]) -> list[int]:
        """Return how many of these are on the device, in host memory and on disk."""
        return [sum(key in place for key in keys) for place in self._places]


class _Union:
    """All that is in any of some places."""

    def __init__(self, places: tuple[Mapping[bytes, int], ...]) -> None:
        self._places = places

    def __contains__(self, key: object) -> bool:
        return any(key in place for place in self._places)


def _needed(limits: Limits, path: list[bytes]) -> list[bytes]:
    """Return the contents that a request needs which goes on behind a prefix."""
    keys: list[bytes] = []
    for index, group in enumerate(limits.groups.all):
        first = (
            len(path) - 1
            if group.is_state
            else limits.groups.first_block(index, len(path) * limits.block_size)
        )
        keys += (key_of(digest, index) for digest in path[first:])
    return keys


def _most_pinned(limits: Limits) -> int:
    groups = limits.groups
    longest = groups.spec.most_blocks(limits.max_request_len, groups.step_tokens)
    return max(0, min(int(limits.num_blocks * MOST_PINNED), limits.num_blocks - longest))


def _only(name: str, known: Collection[bytes], what: str) -> bytes:
    """Return the one digest whose name begins so. Raises `RequestError`."""
    if len(name) < MIN_NAME:
        raise RequestError(
            ErrorCode.INVALID,
            f"{name!r} is too short for the name of a prefix; give {MIN_NAME} digits or more.",
        )
    begin = bytes.fromhex(name[: len(name) // 2 * 2])
    found = [digest for digest in known if digest.startswith(begin) and digest.hex().startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RequestError(
            ErrorCode.INVALID, f"{len(found)} prefixes have names that begin with {name}; give more of it."
        )
    raise RequestError(ErrorCode.NOT_FOUND, f"There is no {what} with a name that begins with {name}.")
