"""Reasoning budgets: force the end of reasoning after a number of tokens.

    output    <think> r0 r1 ...                    </think> answer
                      ^ begin          begin + budget ^  ^ the forced tokens, one per step

The forced token is a function of the tokens in the table, so preemption and recovery need no extra state. No token is
forced if an end marker occurs within the first ``begin + budget`` outputs.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.sampling.logits_processor import DrawRows, Int
from quintet.wire.params import ThinkingBound
from quintet.wire.step import NewRow

NEVER = 1 << 62
NONE = -1
"""No value, in columns of tokens, positions and ways; valid values are not negative."""


class ThinkingBudgets:
    """A logits processor that reports per step the rows it may change: it has no effect in most steps."""

    def __init__(self, max_num_seqs: int) -> None:
        self._budgets = np.zeros(max_num_seqs, np.int64)
        self._earliest = np.zeros(max_num_seqs, np.int64)
        self._ends = np.zeros(max_num_seqs, np.int64)
        """Numbers of outputs between which a token may be forced, as known to the host."""
        self._num_known = np.zeros(max_num_seqs, np.int64)
        """Outputs of each slot before this step. Draft tokens follow them in the token table."""
        self._scanned = np.zeros(max_num_seqs, np.int64)
        """Leading outputs of each slot in which no opening marker begins. Zero on devices other than the CPU."""
        self._bounds: dict[int, ThinkingBound] = {}

    def admit(self, row: NewRow) -> bool:
        """Store the budget of a slot's new request; return whether it has one."""
        bound, slot = row.params.thinking_bound, row.slot
        self._bounds.pop(slot, None)
        if bound is None:
            return False
        self._bounds[slot] = bound
        self._scanned[slot] = 0
        self._budgets[slot] = bound.max_tokens
        opens = [len(way.opens) for way in bound.formats]
        self._earliest[slot] = bound.max_tokens + (min(opens) if bound.open_format is None else 0)
        self._ends[slot] = (
            NEVER if bound.open_format is None else max(opens) + bound.max_tokens + _most_forced(bound)
        )
        return True

    def due(self, slots: Int, num_outputs: Int) -> Int:
        """Return the indexes of draws for which this step may force a token.

        slots, num_outputs: of all draws; those of a slot are in order. num_outputs: before the draw, with drafts.
        """
        is_first = np.diff(slots, prepend=-1) != 0
        self._num_known[slots[is_first]] = num_outputs[is_first]
        return np.flatnonzero((num_outputs >= self._earliest[slots]) & (num_outputs < self._ends[slots]))

    def apply(self, logits: torch.Tensor, rows: DrawRows, which: Int) -> None:
        """Set all logits but the forced token's to -inf in the rows ``which`` of ``logits [S, vocab]`` with a forced token."""
        device = logits.device
        forced = to_device(np.full(len(which), NONE), device)
        groups: dict[bytes, list[int]] = {}
        for index, slot in enumerate(rows.slots[which].tolist()):
            bound = self._bounds[slot]
            key = msgspec.msgpack.encode((bound.formats, bound.closes))
            groups.setdefault(key, []).append(index)
        for members in groups.values():
            chosen = np.array(members)
            forced[to_device(chosen, device)] = self._forced(rows.take(which[chosen]))
        at = to_device(which, device)
        own = logits[at]  # [n, vocab]
        is_forced = (forced >= 0).unsqueeze(1)
        token = forced.clamp(min=0).unsqueeze(1)
        only = torch.full_like(own, -torch.inf).scatter_(1, token, 0.0)
        logits[at] = torch.where(is_forced, only, own)

    def _forced(self, rows: DrawRows) -> torch.Tensor:
        """Return the forced token of each row, or `NONE`: int64[n]. All rows have the same ways and end markers."""
        device, slots = rows.tables.device, rows.slots
        bound = self._bounds[int(slots[0])]
        lengths, scanned = rows.lengths - rows.num_prompt, self._scanned[slots]
        num_outputs = to_device(lengths - scanned, device)  # [n]; positions count from the scanned outputs
        tokens = _outputs(rows, scanned)  # [n, most outputs]
        budget = to_device(self._budgets[slots], device)
        begin, way = self._reasoning_starts(bound, rows, tokens)
        end = begin + budget
        is_over = begin < 0
        for close in bound.closes:
            found = _matches(tokens, close)  # [n, places]
            places = torch.arange(found.shape[1], device=device)
            is_within = (places >= begin.unsqueeze(1)) & (places + len(close) <= end.unsqueeze(1))
            is_over |= (found & is_within).any(dim=1)
        if device.type == "cpu":  # other devices would need a synchronization
            known = np.flatnonzero(lengths == self._num_known[slots])  # the others follow drafts
            has_begun = begin.numpy() >= 0
            ends = np.where(has_begun, end.numpy() + scanned + _most_forced(bound), NEVER)
            self._ends[slots[known]] = ends[known]
            longest = max(len(way.opens) for way in bound.formats)
            scanned = np.where(has_begun, scanned, np.maximum(lengths - longest + 1, 0))
            self._scanned[slots[known]] = scanned[known]
        number = num_outputs - end
        forced = to_device(_padded([way.forced for way in bound.formats]), device)  # [formats, longest]
        chosen = forced[way].gather(1, number.clamp(0, forced.shape[1] - 1).unsqueeze(1)).squeeze(1)
        is_due = ~is_over & (number >= 0) & (number < forced.shape[1])
        return torch.where(is_due, chosen, NONE)

    def _reasoning_starts(
        self, bound: ThinkingBound, rows: DrawRows, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of outputs before the reasoning, `NONE` before its start, and the index of its way:
        int64[n].
        """
        none = tokens.shape[1] + 1
        first = torch.full((len(tokens),), none, dtype=torch.int64, device=tokens.device)
        begin, way = torch.full_like(first, NONE), torch.zeros_like(first)
        for index, each in enumerate(bound.formats):
            found = _matches(tokens, each.opens)
            if not found.shape[1]:
                continue
            place = torch.where(found.any(dim=1), found.to(torch.uint8).argmax(dim=1), none)
            is_first = place < first
            first = torch.where(is_first, place, first)
            begin = torch.where(is_first, place + len(each.opens), begin)
            way = torch.where(is_first, index, way)
        begun = [self._bounds[slot].open_format for slot in rows.slots.tolist()]
        inside = to_device(np.array([NONE if each is None else each for each in begun]), tokens.device)
        is_inside = inside >= 0
        begin = torch.where(is_inside & (first > 0), 0, begin)  # or the output repeats the prompt's marker
        return begin, torch.where(is_inside, inside, way)


def _most_forced(bound: ThinkingBound) -> int:
    return max(len(way.forced) for way in bound.formats)


def _outputs(rows: DrawRows, begins: Int) -> torch.Tensor:
    """Return the rows' outputs from ``begins`` on, int64[n, most], padded with `NONE`."""
    firsts = rows.num_prompt + begins
    device, most = rows.tables.device, int((rows.lengths - firsts).max())
    at = firsts[:, None] + np.arange(most)
    is_output = at < rows.lengths[:, None]
    at = np.where(is_output, at, 0)
    tokens = rows.tables.token_ids[to_device(rows.slots[:, None], device), to_device(at, device)].long()
    return torch.where(to_device(is_output, device), tokens, NONE)


def _matches(tokens: torch.Tensor, mark: list[int]) -> torch.Tensor:
    """Return the matches of a marker in ``tokens [n, L]``: bool[n, L - len(mark) + 1]."""
    num_places = max(0, tokens.shape[1] - len(mark) + 1)
    found = torch.ones((len(tokens), num_places), dtype=torch.bool, device=tokens.device)
    for offset, token in enumerate(mark):
        found &= tokens[:, offset : offset + num_places] == token
    return found


def _padded(lists: list[list[int]]) -> Int:
    """Return the lists as rows, padded with `NONE`."""
    table = np.full((len(lists), max(map(len, lists))), NONE, np.int64)
    for row, values in zip(table, lists, strict=True):
        row[: len(values)] = values
    return table
