"""Build step plans without a core, for batches with long contexts that a core would need minutes to prefill.

Slots and blocks are assigned in a simple way. No request ends, and all contexts have the same length. If KV memory is too small
for the contexts of all rows, rows share contexts.
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
"""Maximum number of block copies in one plan."""
FILLED_TOKENS = 4096
"""Tokens that are computed once and copied to all KV blocks."""


class Batch:
    """``num_rows`` decoding requests with ``context`` tokens of KV before the first step."""

    def __init__(self, plans: Plans, num_rows: int, context: int, num_steps: int) -> None:
        """num_steps: maximum number of steps. Raises `KvMemoryTooSmall`."""
        self._plans = plans
        self._length = context
        self._slots = pack_i32(range(num_rows))
        self._counts, self._samples = pack_i32([1] * num_rows), pack_u8([1] * num_rows)
        self._num_rows = num_rows
        self.admissions = self._admit(num_rows, context, num_steps)

    def _admit(self, num_rows: int, context: int, num_steps: int) -> list[StepPlan]:
        source, size = self._plans, self._plans.block_size
        assert context % size == 0, f"a context of {context} tokens ends within a block of {size}"
        each, own = context // size, num_steps // size + 1
        num_contexts = min(num_rows, (source.num_blocks - num_rows * own) // each)
        if num_contexts < 1:
            raise KvMemoryTooSmall(
                f"{num_rows} rows of {context} tokens: {source.num_blocks} blocks are too few for one context"
            )
        self.num_contexts = num_contexts
        """Number of different contexts; further rows share them."""
        shared = source.order[num_rows * own :]
        plans = []
        for row in range(num_rows):
            begin = row % num_contexts * each
            blocks = [*shared[begin : begin + each], *source.order[row * own : (row + 1) * own]]
            plans.append(source.admission(row, blocks, context + 1))
        return plans

    def step(self) -> StepPlan:
        """Return the next step's plan."""
        plan = self._plans.plan(
            slots=self._slots,
            starts=pack_i32([self._length] * self._num_rows),
            counts=self._counts,
            samples=self._samples,
        )
        self._length += 1
        return plan


class KvMemoryTooSmall(Exception):
    """The KV memory is too small for a batch or a prompt."""


class Plans:
    """Builder of the plans of one worker. Reset the worker before each batch."""

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._max_model_len = max_model_len
        rng = np.random.default_rng(0)
        self.order: NDArray[np.int32] = rng.permutation(num_blocks).astype(np.int32)
        """Blocks in random order, as in a server after hours of operation."""
        self._tokens: NDArray[np.int32] = rng.integers(0, vocab_size, max_model_len, dtype=np.int32)
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
        """Return a plan that admits a request of ``length`` tokens to a slot and computes nothing."""
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
        """Yield the plans of a prompt: its admission, then chunks of ``chunk`` tokens; the last one samples a token."""
        num_blocks = -(-length // self.block_size)
        if num_blocks > self.num_blocks:
            raise KvMemoryTooSmall(
                f"a prompt of {length} tokens needs {num_blocks} blocks; there are {self.num_blocks}"
            )
        yield self.admission(slot, [int(block) for block in self.order[:num_blocks]], length)
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            yield self.plan(
                pack_i32([slot]), pack_i32([start]), pack_i32([count]), pack_u8([start + count == length])
            )

    def fill(self, chunk: int) -> Iterator[StepPlan]:
        """Yield plans that compute one prompt and copy its KV to all blocks, so that no step reads zeros or NaN."""
        length = min(FILLED_TOKENS, self._max_model_len, self.num_blocks * self.block_size)
        length -= length % self.block_size
        yield from self.prompt(length, chunk)
        filled = length // self.block_size
        targets = self.order[filled:]
        pairs = np.stack([self.order[np.arange(len(targets)) % filled], targets], axis=1)
        for at in range(0, len(pairs), MAX_COPIES):
            yield self.plan(copies=pairs[at : at + MAX_COPIES].tobytes())
