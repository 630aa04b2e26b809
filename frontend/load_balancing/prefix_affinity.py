"""Prefix affinity: approximate index of the prompt prefixes in each engine's KV cache, from this frontend's own dispatches.

A prompt is bytes here, about four per token: text, texts of messages, token ids, or the last bytes of each embedding. It is
cut into pieces, and each piece is named by the CRC-32 of all bytes up to its end. Equal prefixes thus have equal names,
and a prefix tree is a flat table. A hash collision only sends one request to an engine without the prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from zlib import crc32

from quintet.frontend.load_balancing.load_ledger import BYTES_PER_TOKEN
from quintet.wire.chat import checked_fields
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt

PIECE_BYTES = 256
PIECE_TOKENS = PIECE_BYTES // BYTES_PER_TOKEN
"""Exact for ids and embeddings, approximate for text."""
MAX_PIECES = 512
"""Per prompt; longer prompts are compared by these only."""
MAX_HASHES = 1 << 16
"""Entries per engine with a KV cache of unknown size."""


def hash_prefixes(prompt: Prompt, salt: str = "", adapter: bytes = b"") -> list[int]:
    """Return the prefix hashes of a prompt, shortest first; empty for a prompt shorter than a piece."""
    content = _bytes_of(prompt)
    names, name = [], crc32(salt.encode(errors="surrogatepass"), crc32(adapter))
    for begin in range(0, min(len(content), MAX_PIECES * PIECE_BYTES) - PIECE_BYTES + 1, PIECE_BYTES):
        name = crc32(content[begin : begin + PIECE_BYTES], name)
        names.append(name)
    return names


def _bytes_of(prompt: Prompt) -> bytes:
    match prompt:
        case TokenPrompt():
            return prompt.token_ids
        case TextPrompt():
            return prompt.text[: MAX_PIECES * PIECE_BYTES].encode(errors="surrogatepass")
        case ChatPrompt():  # templates put tools before messages
            return prompt.tools + prompt.template_kwargs + _texts_of(prompt.messages)
        case EmbedsPrompt():
            return _last_words_of(prompt)


def _texts_of(messages: bytes) -> bytes:
    """Return roles and texts of a conversation, as far as they are compared."""
    found, num_left = [], MAX_PIECES * PIECE_BYTES
    for message in checked_fields(messages):
        found.append(f"{message.role}\n{message.text[:num_left]}\n")
        num_left -= len(found[-1])
        if num_left <= 0:
            break
    return "".join(found).encode()


def _last_words_of(prompt: EmbedsPrompt) -> bytes:
    """Return the last four bytes of each embedding; none where its size is no multiple of four."""
    row_bytes = prompt.span.row_bytes
    num_values, rest = divmod(row_bytes, BYTES_PER_TOKEN)
    if rest:
        return b""
    most = MAX_PIECES * PIECE_TOKENS * row_bytes
    return memoryview(prompt.values)[:most].cast("I")[num_values - 1 :: num_values].tobytes()


class PrefixOwners:
    """Owners of each prefix hash over many engines: a lookup touches only engines with a hit."""

    def __init__(self) -> None:
        self._of: dict[int, int | set[int]] = {}
        """Most hashes have one owner and need no set."""

    def __len__(self) -> int:
        return len(self._of)

    def add(self, names: Iterable[int], engine: int) -> None:
        """Add an owner to hashes."""
        of = self._of
        for name in names:
            held = of.setdefault(name, engine)
            if held == engine:
                continue
            if isinstance(held, set):
                held.add(engine)
            else:
                of[name] = {held, engine}

    def discard(self, name: int, engine: int) -> None:
        """Remove an owner of a hash: the engine evicted it."""
        held = self._of.get(name)
        if isinstance(held, set):
            held.discard(engine)
            if len(held) == 1:
                self._of[name] = held.pop()
        elif held == engine:
            del self._of[name]

    def of(self, names: Sequence[int]) -> list[tuple[int, Collection[int]]]:
        """Return (number of leading pieces, engines that have them), longest first: one entry for each number of engines.

        An engine evicts the end of a prompt before its start. So an engine with a piece has those before it, and the number of
        owners never grows along a prompt.
        """
        found: list[tuple[int, Collection[int]]] = []
        num_known = 0
        while num_known < len(names) and (held := self._of.get(names[num_known])) is not None:
            num = len(held) if isinstance(held, set) else 1
            num_known = bisect_right(names, -num, lo=num_known, key=self._minus_number)
            last = self._of[names[num_known - 1]]
            found.append((num_known, last if isinstance(last, set) else (last,)))
        return found[::-1]

    def _minus_number(self, name: int) -> int:
        """Return the negative number of owners of a hash."""
        held = self._of.get(name)
        return 0 if held is None else -len(held) if isinstance(held, set) else -1


class PrefixAffinity:
    """LRU index of one engine's cached prefixes, as far as known."""

    def __init__(
        self, max_hashes: int = MAX_HASHES, holders: PrefixOwners | None = None, engine: int = 0
    ) -> None:
        """``holders`` gets every entry added or removed, under the index ``engine``."""
        self.max_hashes = max_hashes
        self._used: OrderedDict[int, int] = OrderedDict()
        """Last use of each hash, by use count."""
        self._num_uses = 0
        self._holders, self._engine = holders, engine

    def __len__(self) -> int:
        return len(self._used)

    @property
    def is_full(self) -> bool:
        """True if a new entry evicts an old one."""
        return len(self._used) >= self.max_hashes

    def find(self, names: Sequence[int]) -> tuple[int, int]:
        """Return the number of leading pieces with a hit, and the oldest use among them."""
        num_known, used = 0, self._num_uses
        for name in names:
            last = self._used.get(name)
            if last is None:
                break
            num_known, used = num_known + 1, min(used, last)
        return num_known, used

    def note(self, names: Sequence[int]) -> None:
        """Add a prompt that the engine computes. Its end is evicted before its start."""
        self._num_uses += 1
        used = self._used
        num_known = 0
        while num_known < len(names) and names[num_known] in used:
            num_known += 1
        if self._holders is not None:
            self._holders.add(names[num_known:], self._engine)
        for name in reversed(names[num_known:]):
            used[name] = self._num_uses
        for name in reversed(names[:num_known]):
            used.move_to_end(name)
            used[name] = self._num_uses
        while len(used) > self.max_hashes:
            self._forget()

    def miss(self, used: int) -> None:
        """Drop entries last used at ``used`` or before, after a cache miss on them."""
        while self._used and next(iter(self._used.values())) <= used:
            self._forget()

    def clear(self) -> None:
        """Drop every entry: the engine restarted."""
        while self._used:
            self._forget()

    def _forget(self) -> None:
        """Evict the least recently used entry."""
        name, _ = self._used.popitem(last=False)
        if self._holders is not None:
            self._holders.discard(name, self._engine)
