"""Which engine has computed which beginnings of prompts, as far as this frontend has sent them there.

A prompt is bytes here, about four for a token: its text, its conversation as the client wrote it, its ids, or the end of each of
its vectors. They are cut into pieces, and each piece is named by a checksum of all bytes up to its end. So what two prompts begin
with alike has the same names, a tree of beginnings is a flat table of names, and finding how far an engine knows a prompt is a
walk along its names. A name that two beginnings share by accident sends one request to an engine that does not know it, no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from zlib import crc32

from quintet.frontend.prompt_size import BYTES_PER_TOKEN
from quintet.wire.embeds import EmbedsPrompt
from quintet.wire.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt

PIECE_BYTES = 256
PIECE_TOKENS = PIECE_BYTES // BYTES_PER_TOKEN
"""Of ids and vectors exactly, of text about."""
MAX_PIECES = 512
"""Of a prompt. What is longer is told apart, and found, by these."""
MAX_NAMES = 1 << 16
"""That are remembered of an engine whose memory is not known."""


def names_of(prompt: Prompt, salt: str = "") -> list[int]:
    """Return the names of the beginnings of a prompt, shortest first; none of one shorter than a piece."""
    content = _bytes_of(prompt)
    names, name = [], crc32(salt.encode(errors="surrogatepass"))
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
        case ChatPrompt():  # templates tell tools before messages
            return prompt.tools + prompt.template_kwargs + prompt.messages
        case EmbedsPrompt():
            return _marks_of(prompt)


def _marks_of(prompt: EmbedsPrompt) -> bytes:
    """Return the last four bytes of each vector, as many as an id has; none where vectors are no multiple of that."""
    num_values, rest = divmod(prompt.row_bytes, BYTES_PER_TOKEN)
    if rest:
        return b""
    most = MAX_PIECES * PIECE_TOKENS * prompt.row_bytes
    return memoryview(prompt.values)[:most].cast("I")[num_values - 1 :: num_values].tobytes()


class Holders:
    """Who has each name, of many engines: so that finding those that know a prompt asks nobody who does not."""

    def __init__(self) -> None:
        self._of: dict[int, int | set[int]] = {}
        """Most names are one engine's, and take no set."""

    def __len__(self) -> int:
        return len(self._of)

    def add(self, names: Iterable[int], who: int) -> None:
        """This engine has them from now on."""
        of = self._of
        for name in names:
            held = of.setdefault(name, who)
            if held == who:
                continue
            if isinstance(held, set):
                held.add(who)
            else:
                of[name] = {held, who}

    def discard(self, name: int, who: int) -> None:
        """This engine has forgotten it."""
        held = self._of.get(name)
        if isinstance(held, set):
            held.discard(who)
            if len(held) == 1:
                self._of[name] = held.pop()
        elif held == who:
            del self._of[name]

    def of(self, names: Sequence[int]) -> list[tuple[int, Collection[int]]]:
        """Return how many leading pieces of a prompt who has, those that have most first: an entry for each number of engines.

        An engine forgets the end of a prompt before its beginning, so whoever has a piece has those before it, and how many have
        a piece never grows along a prompt.
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
        """Return how many engines have this name, negative."""
        held = self._of.get(name)
        return 0 if held is None else -len(held) if isinstance(held, set) else -1


class PrefixAffinity:
    """What one engine has computed, and still has, as far as can be told: it forgets what was not used for longest."""

    def __init__(self, max_names: int = MAX_NAMES, holders: Holders | None = None, who: int = 0) -> None:
        """``holders`` is told what the engine that it knows as ``who`` has and forgets."""
        self.max_names = max_names
        self._used: OrderedDict[int, int] = OrderedDict()
        """Of each name, the number of its last use."""
        self._num_uses = 0
        self._holders, self._who = holders, who

    def __len__(self) -> int:
        return len(self._used)

    @property
    def is_full(self) -> bool:
        """Whether more can be had only in the place of what is there."""
        return len(self._used) >= self.max_names

    def find(self, names: Sequence[int]) -> tuple[int, int]:
        """Return how many leading pieces of a prompt the engine has, and when all of them were last used."""
        num_known, used = 0, self._num_uses
        for name in names:
            last = self._used.get(name)
            if last is None:
                break
            num_known, used = num_known + 1, min(used, last)
        return num_known, used

    def note(self, names: Sequence[int]) -> None:
        """The engine is about to compute a prompt. Its end is forgotten before its beginning."""
        self._num_uses += 1
        used = self._used
        num_known = 0
        while num_known < len(names) and names[num_known] in used:
            num_known += 1
        if self._holders is not None:
            self._holders.add(names[num_known:], self._who)
        for name in reversed(names[num_known:]):
            used[name] = self._num_uses
        for name in reversed(names[:num_known]):
            used.move_to_end(name)
            used[name] = self._num_uses
        while len(used) > self.max_names:
            self._forget()

    def miss(self, used: int) -> None:
        """The engine turned out not to have what was last used then: what was not used since is gone as well."""
        while self._used and next(iter(self._used.values())) <= used:
            self._forget()

    def clear(self) -> None:
        """The engine has begun anew."""
        while self._used:
            self._forget()

    def _forget(self) -> None:
        """Forget the name that was not used for longest."""
        name, _ = self._used.popitem(last=False)
        if self._holders is not None:
            self._holders.discard(name, self._who)
