"""Streaming search for stop strings.

An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975) over characters. Failure links are
followed at run time, so memory is linear in the stop strings. Each node has the number of newest characters to hold
back, because they may become a stop string.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from quintet.detokenizer_proc.incremental import Decoder
from quintet.detokenizer_proc.output_parsing import OutputReader

ROOT = 0
MAX_CACHED = 256
NO_STOPS: frozenset[str] = frozenset()
MAX_CACHED_CHARACTERS = 1 << 18
"""Stop strings come from clients; this bounds the memory of unused automata (at most 30 MB)."""


class Hit(NamedTuple):
    """A stop string and its end index (exclusive) in the scanned text."""

    end: int
    stop: str


class StopAutomaton:
    """Automaton of one tuple of stop strings. Immutable and shared by requests with these strings.

    The nodes of a string's unshared suffix are numbered consecutively. So nearly every edge leads to the next number
    and is one list entry; only the edges to the first node of a suffix are in dictionaries.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._along: list[str] = [""]
        """Per node: character of the edge to the next number, or an empty string."""
        self._forks: dict[int, dict[str, int]] = {ROOT: {}}
        """Edges to other numbers, by node."""
        self._ends: list[str | None] = [None]
        depth = array("i", [0])
        letters: dict[str, str] = {}  # interned: one object per character
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
        """Per node: characters at the end of the text that may become a stop string."""
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
                    # A complete stop string without extension need not be held back.
                    hold[node] = hold[fail[node]]

    def scan(
        self, node: int, text: str, armed: bool, always: frozenset[str] = NO_STOPS
    ) -> tuple[int, Hit | None]:
        """Scan ``text`` from ``node``; return the reached node and the first hit, which ends the scan.

        Of stop strings that end at the same character, the longest is the hit. If not ``armed``, only hits of ``always``
        count.
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
            if (stop := ends[node]) is not None and (armed or stop in always):
                return node, Hit(position, stop)
        return node, None


class StopSearch:
    """Search in the text of one output, with the text held back because a stop string may begin in it."""

    __slots__ = (
        "_automaton",
        "_decoder",
        "_follows_reasoning",
        "_include_stop",
        "_node",
        "_run_node",
        "_run_scanned",
        "held",
        "hit",
    )

    def __init__(self, automaton: StopAutomaton, decoder: Decoder, include_stop: bool) -> None:
        self._automaton = automaton
        self._decoder = decoder
        self._include_stop = include_stop
        self._node = ROOT  # automaton node after the released and the held text
        self._run_node = ROOT  # automaton node after the tentative characters too
        self._run_scanned = 0  # tentative characters scanned
        self._follows_reasoning = False  # no text of the answer since the last reasoning
        self.held = ""
        self.hit: str | None = None
        """The stop string that ended the text."""

    def release(self, text: str, armed: bool, reader: OutputReader | None = None) -> str:
        """Scan final text, then the decoder's tentative characters; return the text to release.

        If not ``armed``, hits are ignored. In reasoning, and in the blanks after it, only stop strings with a mark of the
        reader count: clients choose stop strings for the answer.
        """
        if reader is None:
            return self._release(text, armed, NO_STOPS)
        with_marks = reader.stops_with_marks if armed else NO_STOPS
        blank = ""
        if reader.is_reasoning:
            self._follows_reasoning = True
        elif self._follows_reasoning and (text.strip() or self._decoder.tentative):
            self._follows_reasoning = False
            if not (self._run_scanned or self._decoder.tentative):
                answer = text.lstrip()
                blank, text = self._release(text[: len(text) - len(answer)], False, with_marks), answer
                if self.hit is not None:
                    return blank
        return blank + self._release(text, armed and not self._follows_reasoning, with_marks)

    def _release(self, text: str, armed: bool, always: frozenset[str]) -> str:
        released = self._release_final(text, armed, always) if text else ""
        tentative = self._decoder.tentative
        if self.hit is None and tentative:
            # ``decode`` of all tokens so far includes these characters. If they complete a stop string, the output
            # ends, and no later token can change them.
            if not self._run_scanned:
                self._run_node = self._node
            self._run_node, hit = self._automaton.scan(self._run_node, tentative, armed, always)
            self._run_scanned += len(tentative)
            if hit is not None:
                end = self._run_scanned - len(tentative) + hit.end
                released += self._end_at(Hit(end, hit.stop), self._decoder.flush())
        return released

    def take_held(self) -> str:
        """Return the held text at the end of the output."""
        held, self.held = self.held, ""
        return held

    def _release_final(self, text: str, armed: bool, always: frozenset[str]) -> str:
        """Append final text to the held text; return the part that cannot belong to a stop string."""
        node, start = self._node, 0
        if self._run_scanned and not self._decoder.revoked:
            node, start = self._run_node, self._run_scanned  # already scanned as tentative, without a hit
        self._run_scanned = 0
        self._node, hit = self._automaton.scan(node, text[start:] if start else text, armed, always)
        if hit is not None:
            return self._end_at(Hit(start + hit.end, hit.stop), text)
        whole = self.held + text
        cut = len(whole) - self._automaton.hold[self._node]
        self.held = whole[cut:]
        return whole[:cut]

    def _end_at(self, hit: Hit, text: str) -> str:
        """End the output at a hit in ``text``, which follows the held text."""
        self.hit = hit.stop
        end = len(self.held) + hit.end
        released = (self.held + text)[: end if self._include_stop else end - len(hit.stop)]
        self.held = ""
        return released


class StopCache:
    """LRU cache of automata, because many requests have the same stop strings."""

    def __init__(self) -> None:
        self._automata: dict[tuple[str, ...], StopAutomaton] = {}
        self._num_characters = 0

    def automaton(self, stops: Sequence[str]) -> StopAutomaton:
        """Return the automaton of these strings."""
        key = tuple(stops)
        known = self._automata.pop(key, None)
        if known is None:
            known = StopAutomaton(key)
            self._num_characters += sum(map(len, key))
        self._automata[key] = known  # most recently used last
        while len(self._automata) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
            oldest = next(iter(self._automata))
            del self._automata[oldest]
            self._num_characters -= sum(map(len, oldest))
        return known
