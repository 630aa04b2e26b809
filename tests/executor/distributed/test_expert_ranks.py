"""Expert parallelism over ranks: the bits of one process, for every placement of experts.

Ranks are threads of the test, each with its own program, weights and expert copies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.executor.kernels.test_experts_kernels import (
    HIDDEN,
    ROUTINGS,
    SILU,
    correction_of,
    noise,
    pack,
    packed_experts,
    tables_of,
)

from quintet.executor.backends.cpu.ops.experts import ExpertTables
from quintet.executor.backends.cpu.ops.host_dtypes import FLOAT_CODES
from quintet.executor.backends.cpu.ops.host_experts import NO_EXPERT, Homes, HostExperts
from quintet.executor.backends.cpu.ops.host_library import open_library, set_threads
from quintet.executor.backends.cpu.ops.host_linear import Inputs, WeightFormat
from quintet.executor.backends.cpu.program.library import ProgramLibrary
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.distributed.parallel.balancer import ExpertCopies
from quintet.executor.distributed.parallel.library import CRanksShape
from quintet.executor.distributed.parallel.placement import Copy, copies_between, homes_of, placed
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.model_config.share import LINE_BYTES, Share

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

FORMATS = {
    "bf16": (WeightFormat.BF16, 0, torch.bfloat16, False),
    "fp32": (WeightFormat.FP32, 0, torch.float32, False),
    "int4": (WeightFormat.INT4, 32, torch.bfloat16, False),
    "w8a8": (WeightFormat.INT8, 0, torch.bfloat16, True),
}
MAX_TOKENS, PLACES = 64, 2
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each rank has one thread."""
    library = open_library()
    assert library is not None
    set_threads(library, 1, False)
    yield
    set_threads(library, 1, False)


class RankBench:
    """Ranks that share a layer of experts, and one process that has all of it."""

    def __init__(self, name: str, kind: str, size: int) -> None:
        weight_format, group, self.dtype, eight = FORMATS[kind]
        self.routing = routing = ROUTINGS[name]
        tables = tables_of(routing, self.dtype, biased=True)
        self.whole = packed_experts(name, tables, SILU, weight_format, group, eight)
        rows = routing.chosen * (HIDDEN * self.dtype.itemsize + LINE_BYTES)
        shape = CRanksShape(
            ranks=size, max_tokens=MAX_TOKENS, max_rows=8, max_outputs=8, tables=1, slots=8, table_stride=4,
            block_size=16, sums_width=HIDDEN, depth=1, experts_row_bytes=rows, staging_bytes=4096,
        )  # fmt: skip
        memory = os.memfd_create("ranks")
        self.ranks = [
            Ranks(memory, Share(rank, size, by_experts=True, places=PLACES), shape, spins=0)
            for rank in range(size)
        ]
        os.close(memory)
        self.layers = [
            self._layer(name, tables, each.share, weight_format, group, eight) for each in self.ranks
        ]
        self.copies = [
            ExpertCopies([layer], each) for layer, each in zip(self.layers, self.ranks, strict=True)
        ]

    def _layer(
        self,
        name: str,
        tables: ExpertTables,
        share: Share,
        weight_format: WeightFormat,
        group: int,
        eight: bool,
    ) -> HostExperts:
        """Return a rank's layer with zeros in its expert copies."""
        kept = share.of_experts(self.routing.experts)

        def own(table: torch.Tensor | None) -> torch.Tensor:
            assert table is not None
            return torch.cat([table[kept.begin : kept.end], torch.zeros_like(table[:PLACES])])

        return HostExperts(
            self.routing,
            SILU,
            pack(own(tables.gate_up), weight_format, group, True),
            pack(own(tables.down), weight_format, group, False),
            correction=correction_of(name),
            gate_up_bias=own(tables.gate_up_bias),
            down_bias=own(tables.down_bias),
            inputs=(Inputs(eight), Inputs(eight)),
            homes=Homes(share.rank, share.size, share.places),
        )

    def on_all_ranks(self, do: Callable[[int], None]) -> None:
        """Run a function on all ranks in parallel."""
        threads = [threading.Thread(target=do, args=(rank,), daemon=True) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a rank waits forever"

    def copy(self, copy: Copy) -> None:
        """Copy an expert on all ranks, as orders of rank 0 do."""
        for chunk in self.copies[0].chunks_of(0, copy):
            self.on_all_ranks(lambda rank, chunk=chunk: self.copies[rank]._move(chunk))  # type: ignore[misc]

    def compute(self, x: torch.Tensor, scores: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the layer's output of every rank, ``[ranks, tokens, hidden]``."""
        results = torch.full((len(self.ranks), *x.shape), torch.nan, dtype=x.dtype)
        library = open_library()
        assert library is not None
        programs = ProgramLibrary(library)

        def run(rank: int) -> None:
            mine, layer, y = self.ranks[rank], self.layers[rank], results[rank]
            step, program = Step(programs, MAX_TOKENS, 8), programs.new()
            step.c.num_tokens = len(x)
            mine.library.experts(
                *(program, mine.handle, layer.address, x.data_ptr(), x.stride(0)),
                *(scores.data_ptr(), scores.stride(0), MAX_TOKENS, residual.data_ptr()),
                *(y.data_ptr(), y.stride(0), FLOAT_CODES[x.dtype]),
            )
            programs.run(program, step.address, 0, programs.size(program))
            programs.delete(program)

        self.on_all_ranks(run)
        return results

    def drawn(self, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs, router scores that favour few experts, and a residual."""
        hot = noise(self.routing.experts, seed=3) * 2
        scores = (noise(tokens, self.routing.experts, seed=seed) + hot).to(self.dtype)
        x, residual = (noise(tokens, HIDDEN, dtype=self.dtype, seed=seed + i) for i in (1, 2))
        return x, scores, residual

    def check(self, tokens: int, seed: int) -> None:
        """Compute a step; every rank must have the bits of one process."""
        x, scores, residual = self.drawn(tokens, seed)
        expected = (self.whole(x, scores).float() + residual.float()).to(self.dtype)
        for y in self.compute(x, scores, residual):
            assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8)), (tokens, seed)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "deepseek v3", "llama4"])
def test_every_rank_has_the_bits_of_one_process_for_every_placement(name: str, kind: str, size: int) -> None:
    """Before, during and after experts are copied, until the loads need no more copies."""
    ranks = RankBench(name, kind, size)
    experts = ranks.routing.experts
    for tokens in (1, 5, MAX_TOKENS):
        ranks.check(tokens, seed=10 * tokens)
    homes = homes_of(experts, size)
    for rank in range(size):
        others = [expert for expert in range(experts) if homes[expert] != rank]
        for expert in others[: PLACES + 1]:
            place = expert % PLACES
            chunks = list(ranks.copies[0].chunks_of(0, Copy(expert, homes[expert], rank, place)))
            assert len(chunks) > 1
            for chunk in chunks:
                ranks.on_all_ranks(lambda one, chunk=chunk: ranks.copies[one]._move(chunk))  # type: ignore[misc]
                is_there = chunk is chunks[-1]
                assert all(
                    each.copies[rank, place] == (expert if is_there else NO_EXPERT) for each in ranks.layers
                )
                ranks.check(7, seed=expert)
            ranks.check(MAX_TOKENS, seed=expert)


@pytest.mark.parametrize("size", [2, 4])
def test_copies_of_hot_experts_balance_the_load(size: int) -> None:
    ranks = RankBench("olmoe", "bf16", size)

    def busiest(seeds: range) -> float:
        loads_before = ranks.layers[0].asked.copy()
        for seed in seeds:
            ranks.compute(*ranks.drawn(MAX_TOKENS, seed))
        asked = [layer.asked for layer in ranks.layers]
        assert all((each == asked[0]).all() for each in asked), "all ranks must count the same loads"
        most, total = (asked[0] - loads_before)[-2:].tolist()
        return float(most) * size / float(total)

    before = busiest(range(4))
    loads, homes = ranks.layers[0].asked[:-2].tolist(), homes_of(ranks.routing.experts, size)
    now = ((None,) * PLACES,) * size
    for copy in copies_between(now, placed(loads, homes, now), homes):
        ranks.copy(copy)
    after = busiest(range(4, 8))
    assert before > 1.25, "the loads must be uneven before"
    assert after - 1 < (before - 1) / 2, (before, after)
