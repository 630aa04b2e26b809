"""Simulate the balance of expert work between ranks, with and without redundant experts: random routing, the real balancer.

    python -m bench.distributed.experts_balance [--ranks 4 8] [--rows 32 512] [--zipf 0.5 1] [--places 1 2 4]
        [--steps 1500] [--save FILE]

The model has one layer. Tokens choose experts by a Zipf distribution; every ``--drift`` steps, two experts swap their popularity.
The kernels' division of rows (`qt_experts_divide`) applies. `quintet.executor.distributed.parallel.balancer` reads the loads and
copies experts, in one idle task every fourth step.

Prints the ratio of the busiest rank's work to the mean, summed over the steps after the first action. Also prints the ratio with
each expert's rows divided evenly among its ranks, and the number of later copies. The simulation measures no time, so the output
is the same on every machine.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.arguments import command_parser
from bench.overhead.run import Machine, _commit, machine
from quintet.executor.backends.cpu.ops.host_experts import NO_EXPERT, CExperts, Homes
from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.distributed.parallel.balancer import Balancer, CopyChunk
from quintet.executor.distributed.parallel.placement import Copy, homes_of
from quintet.executor.worker import STEPS_PER_IDLE_TASK
from quintet.wire.config import EplbConfig

EXPERTS, CHOSEN = 128, 8
EXPERT_BYTES = 3 * 2048 * 768 * 2
"""Size of an expert of Qwen3-30B-A3B in bf16."""
READ_ROWS = 12
"""Rows that are multiplied in the time to read an expert, as in ``csrc/cpu/ranks/expert_shares.hpp``."""
STAGING_BYTES = 4 << 20
SETTLE_STEPS = 400
"""Steps between the balancer's first action and the measurement; all copies are complete by then."""


class Figures(msgspec.Struct, frozen=True):
    """Results of one simulation."""

    ranks: int
    rows: int
    zipf: float
    drift: int
    places: int
    busiest: float
    """Ratio of the busiest rank's work to the mean."""
    divided_evenly: float
    copied: int
    """Number of copied experts."""
    moved_bytes: int
    steps: int


class Report(msgspec.Struct, frozen=True):
    """Contents of the result file."""

    date: str
    commit: str
    machine: Machine
    command: str
    figures: list[Figures]


@dataclass(slots=True)
class Layer:
    """The fields of `quintet.executor.backends.cpu.ops.host_experts.HostExperts` that a balancer reads."""

    homes: Homes
    copies: NDArray[np.int32]
    asked: NDArray[np.int64]


class FakeExpertCopies:
    """`quintet.executor.distributed.parallel.balancer.ExpertCopies` without weights."""

    def __init__(self, layer: Layer) -> None:
        self.layers = [layer]

    def chunks_of(self, layer: int, copy: Copy) -> Iterator[CopyChunk]:
        """As in `ExpertCopies`."""
        for begin in range(0, EXPERT_BYTES, STAGING_BYTES):
            end = min(begin + STAGING_BYTES, EXPERT_BYTES)
            yield CopyChunk(
                layer, copy.expert, copy.source, copy.target, copy.place, begin, end, EXPERT_BYTES
            )

    def send(self, chunk: CopyChunk) -> None:
        """As in `ExpertCopies`."""
        is_there = chunk.end == chunk.size
        self.layers[0].copies[chunk.target, chunk.place] = chunk.expert if is_there else NO_EXPERT


def route(seed: int, rows: int, zipf: float, drift: int, steps: int) -> Iterator[NDArray[np.int64]]:
    """Yield the number of rows of each expert, for each step. drift: steps between two swaps of popularity."""
    rng = np.random.default_rng(seed)
    log_popularity = -zipf * np.log(np.arange(1, EXPERTS + 1))
    rng.shuffle(log_popularity)
    for step in range(steps):
        if step % drift == drift - 1:
            one, other = rng.choice(EXPERTS, 2, replace=False)
            log_popularity[one], log_popularity[other] = log_popularity[other], log_popularity[one]
        noise = rng.gumbel(size=(rows, EXPERTS)).astype(np.float32)
        chosen = np.argpartition(-(log_popularity + noise), CHOSEN, axis=1)[:, :CHOSEN]
        yield np.bincount(chosen.ravel(), minlength=EXPERTS)


def simulate(
    ranks: int, rows: int, zipf: float, places: int, drift: int, steps: int, config: EplbConfig
) -> Figures:
    """Simulate ``steps`` steps of routing and balancing."""
    library = open_library()
    assert library is not None, "the host kernels are not built"
    divide = declare(library, "qt_experts_divide", ctypes.c_void_p, ctypes.c_void_p)
    copies = np.full((ranks, places), NO_EXPERT, np.int32)
    layer = Layer(Homes(0, ranks, places), copies, np.zeros(EXPERTS + 2, np.int64))
    kept = EXPERTS // ranks
    c_experts = CExperts(experts=EXPERTS, kept=kept, ranks=ranks, places=places)
    c_experts.copies, c_experts.asked = copies.ctypes.data, layer.asked.ctypes.data
    balancer = Balancer(FakeExpertCopies(layer), config)  # type: ignore[arg-type]
    homes, evenly = np.array(homes_of(EXPERTS, ranks)), 0.0
    first, before = config.step_interval + SETTLE_STEPS, (0, 0)
    for step, counts in enumerate(route(7, rows, zipf, drift, first + steps)):
        if step == first:
            layer.asked[-2:], evenly, before = 0, 0.0, (balancer.num_copies, balancer.bytes_moved)
        balancer.note_step()
        if places and step % STEPS_PER_IDLE_TASK == 0:
            balancer.run_idle_task()
        divide(ctypes.addressof(c_experts), counts.ctypes.data)
        evenly += _busiest_evenly(counts, homes, copies)
    busiest, total = layer.asked[-2:].tolist()
    return Figures(
        *(ranks, rows, zipf, drift, places, busiest * ranks / total, evenly * ranks / total),
        *(balancer.num_copies - before[0], balancer.bytes_moved - before[1], steps),
    )


def _busiest_evenly(counts: NDArray[np.int64], homes: NDArray[np.int64], copies: NDArray[np.int32]) -> float:
    """Return the work of the busiest rank if each expert's rows are divided evenly among the ranks that have it."""
    ranks = len(copies)
    has = np.zeros((ranks, EXPERTS), bool)
    has[homes, np.arange(EXPERTS)] = True
    for rank, copied in enumerate(copies):
        has[rank, copied[copied != NO_EXPERT]] = True
    rows = has * (counts / has.sum(0))
    return float(np.where(rows > 0, np.maximum(rows, READ_ROWS), 0).sum(1).max())


def main() -> None:
    """Simulate, print and save."""
    parser = command_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--zipf", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--places", type=int, nargs="+", default=[1, 2, 4], help="redundant experts per rank")
    parser.add_argument("--drift", type=int, default=100, help="steps between two swaps of popularity")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--window", type=int, default=250, help="window_size of --eplb-config")
    parser.add_argument("--interval", type=int, default=250, help="step_interval of --eplb-config")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results as JSON")
    args = parser.parse_args()
    config, figures = EplbConfig(args.window, args.interval), []
    print(
        "| ranks | rows | Zipf | places | busiest over mean | divided evenly | copied | moved, MB a 1000 steps |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for ranks, rows, zipf, places in itertools.product(args.ranks, args.rows, args.zipf, [0, *args.places]):
        each = simulate(ranks, rows, zipf, places, args.drift, args.steps, config)
        figures.append(each)
        moved = each.moved_bytes / 1e6 * 1000 / each.steps
        print(
            f"| {ranks} | {rows} | {zipf} | {places} | {each.busiest:.2f} | {each.divided_evenly:.2f} | {each.copied} |"
            f" {moved:.0f} |"
        )
    if args.save is not None:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        flags = " ".join(f"--{name} {value}" for name, value in vars(args).items() if name != "save")
        report = Report(date, _commit(), machine(), flags, figures)
        args.save.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


if __name__ == "__main__":
    main()
