"""Finding stop strings in text that arrives in pieces.

An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975) over characters, with failure links
followed at run time so that memory is linear in the stop strings. Its node also tells how much of the newest text
could still become a stop string and must be held back. Nothing here knows of tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

ROOT = 0
MAX_CACHED = 256


class Hit(NamedTuple):
    """A stop string and the index in the scanned text just after its last character."""

    end: int
    stop: str


class StopAutomaton:
    """The automaton of one tuple of stop strings. Immutable: every request with these strings shares it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [ROOT]
        self._ends: list[str | None] = [None]
        self.hold: list[int] = [0]
        """Per node: characters at the end of the text that may yet grow into a stop string."""
        depth = [0]
        for stop in stops:
            node = ROOT
            for character in stop:
                child = self._next[node].get(character)
                if child is None:
                    child = len(self._next)
                    self._next[node][character] = child
                    self._next.append({})
                    self._fail.append(ROOT)
                    self._ends.append(None)
                    self.hold.append(0)
                    depth.append(depth[node] + 1)
                node = child
            self._ends[node] = stop
        self._link(depth)
        first = "".join(re.escape(character) for character in sorted(self._next[ROOT]))
        self._first = re.compile(f"[{first}]")

    def _link(self, depth: list[int]) -> None:
        """Set failure links breadth first, so that a node's link is complete before its children's."""
        queue = deque([ROOT])
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                queue.append(child)
                if node != ROOT:
                    fallback = self._fail[node]
                    while fallback != ROOT and character not in self._next[fallback]:
                        fallback = self._fail[fallback]
                    self._fail[child] = self._next[fallback].get(character, ROOT)
            if node != ROOT:
                fail = self._fail[node]
                if self._ends[node] is None:
                    self._ends[node] = self._ends[fail]
                # A stop string that nothing extends has been decided: only what follows it counts.
                self.hold[node] = depth[node] if self._next[node] else self.hold[fail]

    def scan(self, node: int, text: str, armed: bool) -> tuple[int, Hit | None]:
        """Read ``text`` from ``node``; return the node reached and the first hit, where reading ends.

        Of stop strings that end at the same character the longest is the hit: it begins first. Not ``armed``, hits
        are passed over.
        """
        following, fail, ends = self._next, self._fail, self._ends
        position, length = 0, len(text)
        while position < length:
            if node == ROOT:
                match = self._first.search(text, position)
                if match is None:
                    return ROOT, None
                position = match.start()
            character = text[position]
            position += 1
            while (child := following[node].get(character)) is None and node != ROOT:
                node = fail[node]
            node = ROOT if child is None else child
            if armed and (stop := ends[node]) is not None:
                return node, Hit(position, stop)
        return node, None


class StopCache:
    """The automata of the stop strings in use: many requests bring the same ones."""

    def __init__(self) -> None:
        self._automata: dict[tuple[str, ...], StopAutomaton] = {}

    def automaton(self, stops: Sequence[str]) -> StopAutomaton | None:
        """Return the automaton of these strings, or None when there are none."""
        if not stops:
            return None
        key = tuple(stops)
        known = self._automata.pop(key, None) or StopAutomaton(key)
        self._automata[key] = known  # the newest use goes last, the oldest is dropped first
        if len(self._automata) > MAX_CACHED:
            del self._automata[next(iter(self._automata))]
        return known
