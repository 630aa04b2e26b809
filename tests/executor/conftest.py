"""Fixtures for the sampler with given logits: no model and no blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from quintet.executor.sampling.logits_processor import DrawRows
from quintet.executor.sampling.ops import sampling_ops_of
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.codec import pack_i32, pack_u8
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan, TokenLogprobs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: tests run in parallel."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Drawer:
    """One request that draws a token."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    outputs: list[int] = field(default_factory=list)
    seed: int = 0
    stop_ids: list[int] = field(default_factory=list)
    bad_word_ids: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


def new_row(slot: int, drawer: Drawer) -> NewRow:
    return NewRow(
        slot=slot,
        generation=1,
        request_id=slot,
        token_ids=pack_i32(drawer.tokens),
        num_prompt_tokens=len(drawer.prompt),
        params=drawer.params,
        seed=drawer.seed,
        stop_ids=drawer.stop_ids,
        bad_word_ids=drawer.bad_word_ids,
    )


def plan_of(drawers: list[Drawer], slots: list[int]) -> StepPlan:
    """Return a plan in which every drawer arrives and draws its next token."""
    return StepPlan(
        step=1,
        sent_ns=0,
        freed=b"",
        new_rows=[new_row(slot, drawer) for slot, drawer in zip(slots, drawers, strict=True)],
        blocks=b"",
        copies=b"",
        slots=pack_i32(slots),
        starts=pack_i32([len(drawer.tokens) - 1 for drawer in drawers]),
        counts=pack_i32([1] * len(drawers)),
        samples=pack_u8([1] * len(drawers)),
    )


class SamplerBench:
    """Admits drawers and draws their tokens."""

    def __init__(self, vocab_size: int, max_num_seqs: int = 64, max_model_len: int = 64) -> None:
        self.vocab_size = vocab_size
        self.ops = sampling_ops_of("cpu")
        self.tables = SlotTables(max_num_seqs, max_model_len, full_layers(1, 1, 8, 4, 4), torch.device("cpu"))
        self.sampler = Sampler(max_num_seqs, vocab_size, self.tables, self.ops)

    def admit(self, drawers: list[Drawer], slots: list[int] | None = None) -> Rows:
        """Admit drawers into slots, by default scattered ones."""
        slots = slots or [(7 * i + 3) % len(self.tables.generations) for i in range(len(drawers))]
        plan = plan_of(drawers, slots)
        self.tables.apply(plan)
        for row in plan.new_rows:
            self.sampler.admit(row)
        return Rows(plan)

    def draw(
        self, drawers: list[Drawer], logits: torch.Tensor, slots: list[int] | None = None
    ) -> tuple[list[int], list[TokenLogprobs]]:
        """Draw one token for each drawer from its row of logits."""
        drawn, reports = self.sampler.draw(self.admit(drawers, slots), logits)
        return drawn.tolist(), reports

    def draw_rows(self, rows: Rows) -> DrawRows:
        """Return the rows in the form that logits processors read."""
        lengths = rows.starts + rows.counts
        return DrawRows(
            self.tables, rows.slots, lengths, np.asarray(self.tables.num_prompt_tokens[rows.slots])
        )
