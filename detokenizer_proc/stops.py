"""Finding stop strings in text that arrives in pieces.

An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975) over characters, with failure links
followed at run time so that memory is linear in the stop strings. Its node also tells how much of the newest text
could still become a stop string and must be held back. Nothing here knows of tokens.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import NamedTuple

ROOT = 0
MAX_CACHED = 256
MAX_CACHED_CHARACTERS = 1 << 18
"""Stop strings are the client's: this bounds what the automata nobody uses now may hold (at most 30 MB)."""


class Hit(NamedTuple):
    """A stop string and the index in the scanned text just after its last character."""

    end: int
    stop: str


class StopAutomaton:
    """The automaton of one tuple of stop strings. Immutable: every request with these strings shares it.

    Where a string leaves what the others share, its nodes are numbered on from there, so nearly every edge leads from a
    node to the next and is one entry of a list; only the few that begin such a stretch are in dictionaries.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._along: list[str] = [""]
        """Per node: the character that leads to the next number, or nothing."""
        self._forks: dict[int, dict[str, int]] = {ROOT: {}}
        """The edges to other numbers, of the nodes that have any."""
        self._ends: list[str | None] = [None]
        depth = array("i", [0])
        letters: dict[str, str] = {}  # one object per character, however often it occurs
        for stop in stops:
            node, common = ROOT, 0
            while common < len(stop) and (child := self._child(node, stop[common])) is not None:
                node, common = child, common + 1
            if common < len(stop):
                self._forks.setdefault(node, {})[stop[common]] = len(self._along)
                self._along += [letters.setdefault(letter, letter) for letter in stop[common + 1 :]]
                self._along.append("")
                self._ends += [None] * (len(stop) - common)
                depth.extend(range(common + 1, len(stop) + 1))
                node = len(self._along) - 1
            self._ends[node] = stop
        self._fail = array("i", bytes(4 * len(depth)))
        self.hold = depth[:]
        """Per node: characters at the end of the text that may yet grow into a stop string."""
        self._link(depth)
        first = "".join(re.escape(character) for character in sorted(self._forks[ROOT]))
        self._first = re.compile(f"[{first}]")

    def _child(self, node: int, character: str) -> int | None:
        if self._along[node] == character:
            return node + 1
        forks = self._forks.get(node)
        return None if forks is None else forks.get(character)

    def _link(self, depth: Sequence[int]) -> None:
        """Set failure links breadth first, so that a node's link is complete before its children's."""
        along, forks, fail, ends, hold = self._along, self._forks, self._fail, self._ends, self.hold
        get_forks, get_first = forks.get, forks[ROOT].get
        for node in sorted(range(len(along)), key=depth.__getitem__):
            edges = [(along[node], node + 1)] if along[node] else []
            edges += get_forks(node, {}).items()
            if node != ROOT:
                for character, child in edges:
                    fallback = fail[node]
                    while fallback != ROOT:
                        if along[fallback] == character:
                            fail[child] = fallback + 1
                            break
                        other = get_forks(fallback)
                        if other is not None and character in other:
                            fail[child] = other[character]
                            break
                        fallback = fail[fallback]
                    else:
                        fail[child] = get_first(character, ROOT)
                if ends[node] is None:
                    ends[node] = ends[fail[node]]
                if not edges:
                    # A stop string that nothing extends has been decided: only what follows it counts.
                    hold[node] = hold[fail[node]]

    def scan(self, node: int, text: str, armed: bool) -> tuple[int, Hit | None]:
        """Read ``text`` from ``node``; return the node reached and the first hit, where reading ends.

        Of stop strings that end at the same character the longest is the hit: it begins first. Not ``armed``, hits
        are passed over.
        """
        along, forks, fail, ends = self._along, self._forks, self._fail, self._ends
        position, length = 0, len(text)
        while position < length:
            if node == ROOT:
                match = self._first.search(text, position)
                if match is None:
                    return ROOT, None
                position = match.start()
            character = text[position]
            position += 1
            while along[node] != character:
                edges = forks.get(node)
                if edges is not None and (child := edges.get(character)) is not None:
                    node = child
                    break
                if node == ROOT:
                    break
                node = fail[node]
            else:
                node += 1
            if armed and (stop := ends[node]) is not None:
                return node, Hit(position, stop)
        return node, None


class StopCache:
    """The automata of the stop strings in use: many requests bring the same ones."""

    def __init__(self) -> None:
        self._automata: dict[tuple[str, ...], StopAutomaton] = {}
        self._num_characters = 0

    def automaton(self, stops: Sequence[str]) -> StopAutomaton | None:
        """Return the automaton of these strings, or None when there are none."""
        if not stops:
            return None
        key = tuple(stops)
        known = self._automata.pop(key, None)
        if known is None:
            known = StopAutomaton(key)
            self._num_characters += sum(map(len, key))
        self._automata[key] = known  # the newest use goes last, the oldest is dropped first
        while len(self._automata) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
            oldest = next(iter(self._automata))
            del self._automata[oldest]
            self._num_characters -= sum(map(len, oldest))
        return known
