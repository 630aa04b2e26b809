"""Plans made by hand: batches that a core would take minutes to arrive at, for one worker in this process.

Owns slots and blocks as a core does, in a simpler way: no request leaves, all contexts are as long, and where memory does not
hold a context for every row, rows read each other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from quintet.wire.codec import pack_i32, pack_u8
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
MAX_COPIES = 4096
"""Block copies in one plan."""
FILLED_TOKENS = 4096
"""Tokens that are computed once and copied into all of the KV memory."""


class Batch:
    """Rows that decode side by side: ``num_rows`` requests with ``context`` tokens of KV before the first step."""

    def __init__(self, house: Plans, num_rows: int, context: int, num_steps: int) -> None:
        """num_steps: the most that will be planned. Raises `NoRoom`."""
        self._house = house
        self._length = context
        self._slots = pack_i32(range(num_rows))
        self._counts, self._samples = pack_i32([1] * num_rows), pack_u8([1] * num_rows)
        self._num_rows = num_rows
        self.admissions = self._admit(num_rows, context, num_steps)

    def _admit(self, num_rows: int, context: int, num_steps: int) -> list[StepPlan]:
        house, size = self._house, self._house.block_size
        assert context % size == 0, f"a context of {context} tokens ends within a block of {size}"
        each, own = context // size, num_steps // size + 1
        num_contexts = min(num_rows, (house.num_blocks - num_rows * own) // each)
        if num_contexts < 1:
            raise NoRoom(
                f"{num_rows} rows of {context} tokens: {house.num_blocks} blocks hold not even one context"
            )
        self.num_contexts = num_contexts
        """Rows that have a context of their own; the others read theirs."""
        shared = house.order[num_rows * own :]
        plans = []
        for row in range(num_rows):
            at = row % num_contexts * each
            blocks = [*shared[at : at + each], *house.order[row * own : (row + 1) * own]]
            plans.append(house.admission(row, blocks, context + 1))
        return plans

    def step(self) -> StepPlan:
        """Return the next step's plan."""
        plan = self._house.plan(
            slots=self._slots,
            starts=pack_i32([self._length] * self._num_rows),
            counts=self._counts,
            samples=self._samples,
        )
        self._length += 1
        return plan


class NoRoom(Exception):
    """The KV memory is too small for what was asked."""


class Plans:
    """State that one worker's plans are made from. The worker's tables are emptied before each batch."""

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._max_model_len = max_model_len
        draw = np.random.default_rng(0)
        self.order: NDArray[np.int32] = draw.permutation(num_blocks).astype(np.int32)
        """Blocks as a server that has run for hours would hand them out."""
        self._tokens: NDArray[np.int32] = draw.integers(0, vocab_size, max_model_len, dtype=np.int32)
        self._step = 0

    def plan(
        self,
        slots: bytes = b"",
        starts: bytes = b"",
        counts: bytes = b"",
        samples: bytes = b"",
        new_rows: Sequence[NewRow] = (),
        blocks: bytes = b"",
        copies: bytes = b"",
    ) -> StepPlan:
        """Return the next plan."""
        self._step += 1
        return StepPlan(
            step=self._step,
            sent_ns=0,
            freed=b"",
            new_rows=list(new_rows),
            blocks=blocks,
            copies=copies,
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
        )

    def admission(self, slot: int, blocks: Sequence[int], length: int) -> StepPlan:
        """Return a plan that puts a request of ``length`` tokens into a slot and computes nothing."""
        row = NewRow(
            slot=slot,
            generation=self._step + 1,
            request_id=slot + 1,
            token_ids=np.roll(self._tokens, slot)[:length].tobytes(),
            num_prompt_tokens=length,
            params=GREEDY,
            seed=slot,
        )
        entries = [value for at, block in enumerate(blocks) for value in (slot, 0, at, int(block))]
        return self.plan(new_rows=[row], blocks=pack_i32(entries))

    def prompt(self, length: int, chunk: int, slot: int = 0) -> Iterator[StepPlan]:
        """Compute a prompt of ``length`` tokens, at most ``chunk`` in a step, and draw one token. The first plan admits."""
        num_blocks = -(-length // self.block_size)
        if num_blocks > self.num_blocks:
            raise NoRoom(f"a prompt of {length} tokens: there are {self.num_blocks} blocks")
        yield self.admission(slot, [int(block) for block in self.order[:num_blocks]], length)
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            yield self.plan(
                pack_i32([slot]), pack_i32([start]), pack_i32([count]), pack_u8([start + count == length])
            )

    def fill(self, chunk: int) -> Iterator[StepPlan]:
        """Compute one prompt and copy its keys and values into every block: no step shall multiply zeros or garbage."""
        length = min(FILLED_TOKENS, self._max_model_len, self.num_blocks * self.block_size)
        length -= length % self.block_size
        yield from self.prompt(length, chunk)
        filled = length // self.block_size
        targets = self.order[filled:]
        pairs = np.stack([self.order[np.arange(len(targets)) % filled], targets], axis=1)
        for at in range(0, len(pairs), MAX_COPIES):
            yield self.plan(copies=pairs[at : at + MAX_COPIES].tobytes())
