"""Exchanges between devices: ranks that run concurrently, in threads, over each other's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from tests.cuda.emulated import EmulatedDevice
from tests.cuda.kernels.formats import FORMATS
from tests.cuda.kernels.formats import noise as noise_on
from tests.cuda.kernels.references import all_reduce_reference
from tests.cuda.rank_devices import devices_of, peers_of, run_concurrently

from quintet.executor.backends.cuda.ops.collectives import (
    CHANNELS,
    HALF_BYTES,
    MAILBOX_BYTES,
    Columns,
    Peers,
    RankDesyncError,
    all_reduce,
    chunks_of,
    gather,
)

RANKS = (2, 4)
SHAPES = ((1, 8), (3, 100), (5, 72), (1, 33), (9, 4104))
"""One pack; no multiple of a pack or chunk; single numbers; several chunks of packs."""


noise = partial(noise_on, where=torch.device("cpu"))


def sums_of_all(
    parts: Sequence[torch.Tensor], bias: torch.Tensor | None, *, in_place: bool = False
) -> list[torch.Tensor]:
    devices = devices_of(len(parts))

    def work(device: EmulatedDevice, peers: Peers, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = all_reduce(device, peers, x, bias, x if in_place else None)
        peers.check()
        return y

    return run_concurrently(
        [partial(work, *each) for each in zip(devices, peers_of(devices), parts, strict=True)]
    )


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", RANKS)
def test_every_rank_has_the_bits_of_the_reference(
    size: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    parts = [noise(*shape, dtype=dtype, seed=rank) for rank in range(size)]
    bias = noise(shape[1], dtype=dtype, seed=9)
    for each in sums_of_all(parts, bias):
        assert torch.equal(each, all_reduce_reference(parts, bias))
    for each in sums_of_all(parts, None, in_place=True):
        assert torch.equal(each, all_reduce_reference(parts))


@pytest.mark.whole
def test_eight_ranks() -> None:
    parts = [noise(3, 64, dtype=torch.bfloat16, seed=rank) for rank in range(8)]
    for each in sums_of_all(parts, None):
        assert torch.equal(each, all_reduce_reference(parts))


def test_bits_of_a_row_depend_on_the_row_only() -> None:
    """Alone, among others, and at another offset of another chunk, for every message size."""
    many = [noise(600, 64, dtype=torch.bfloat16, seed=rank) for rank in range(4)]
    together = sums_of_all(many, None)[0]
    for row in (0, 257, 599):
        alone = sums_of_all([each[row : row + 1] for each in many], None)[0]
        assert torch.equal(alone[0], together[row])


def test_consecutive_exchanges_need_no_host_wait() -> None:
    """Hundreds of exchanges of all sizes and both kinds, each on the result of the previous one, without host waits."""
    size, rounds = 2, 40
    devices = devices_of(size)
    shapes = [(1, 64), (40, 64), (3, 7), (300, 64), (2, 64)]

    def work(device: EmulatedDevice, peers: Peers) -> list[torch.Tensor]:
        columns = Columns(device, (40, 24), 4)
        kept = torch.full((1, 1), float(peers.rank))
        results = []
        for turn in range(rounds):
            rows, width = shapes[turn % len(shapes)]
            x = torch.full((rows, width), float(turn % 7 + peers.rank)) + kept[0, 0] / 1024
            kept = all_reduce(device, peers, x)
            whole = torch.empty(rows, columns.whole)
            own = torch.full((rows, columns.widths[peers.rank]), float(kept[0, 0]) + peers.rank)
            gather(device, peers, columns, rows, own, whole)
            results += [kept.clone(), whole]
        peers.check()
        return results

    def expected() -> list[torch.Tensor]:
        kept, results = [0.0, 1.0], []
        for turn in range(rounds):
            rows, width = shapes[turn % len(shapes)]
            total = sum(
                torch.tensor(turn % 7 + rank) + torch.tensor(kept[rank]) / 1024 for rank in range(size)
            )
            assert isinstance(total, torch.Tensor)
            kept = [float(total)] * size
            whole = torch.cat((torch.full((rows, 40), kept[0]), torch.full((rows, 24), kept[0] + 1.0)), 1)
            results += [torch.full((rows, width), kept[0]), whole]
        return results

    for results in run_concurrently(
        [partial(work, *each) for each in zip(devices, peers_of(devices), strict=True)]
    ):
        assert all(torch.equal(got, want) for got, want in zip(results, expected(), strict=True))


@pytest.mark.parametrize(
    ("widths", "dtype"),
    [
        ((64, 64), torch.bfloat16),
        ((5, 6), torch.float32),
        ((3, 4, 3, 4), torch.float16),
        ((1, 0, 2, 1), torch.int32),
        ((4100, 4100), torch.float32),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_gather_joins_the_columns_of_all_ranks(
    num_rows: int, widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    devices = devices_of(len(widths))
    parts = [
        (noise(num_rows, width, dtype=torch.float32, seed=rank) * 100).to(dtype)
        for rank, width in enumerate(widths)
    ]

    def work(rank: int, peers: Peers) -> torch.Tensor:
        columns = Columns(devices[rank], widths, dtype.itemsize)
        whole = torch.zeros(num_rows, sum(widths), dtype=dtype)
        for out in (None if rank else whole, whole):  # at first only one rank needs them
            gather(devices[rank], peers, columns, num_rows, parts[rank] if widths[rank] else None, out)
        peers.check()
        return whole

    peers = peers_of(devices)
    for whole in run_concurrently([partial(work, rank, each) for rank, each in enumerate(peers)]):
        assert torch.equal(whole, torch.cat(parts, 1))


@pytest.mark.parametrize("num_tokens", [1, 9000])
def test_broadcast_in_place(num_tokens: int) -> None:
    devices = devices_of(2)
    ids = torch.arange(num_tokens, dtype=torch.int32)

    def work(device: EmulatedDevice, peers: Peers) -> torch.Tensor:
        own = ids.clone() if peers.rank == 0 else torch.zeros_like(ids)
        columns = Columns(device, (1, 0), 4)
        gather(device, peers, columns, num_tokens, None if peers.rank else own, own)
        return own

    for own in run_concurrently(
        [partial(work, *each) for each in zip(devices, peers_of(devices), strict=True)]
    ):
        assert torch.equal(own, ids)


def test_missing_rank_is_an_error_and_not_a_hang() -> None:
    """A launch after the timeout does not wait again."""
    devices = devices_of(2)
    [alone, _] = peers_of(devices, timeout_s=0.01)
    alone.check()
    for _ in range(2):
        all_reduce(devices[0], alone, torch.ones(4000, 8))
        with pytest.raises(RankDesyncError, match=r"rank 0 of 2 timed out after 0\.01 s"):
            alone.check()
    [patient, _] = peers_of(devices, timeout_s=3600.0)
    patient._counts[0] = 1  # as after an earlier exchange
    all_reduce(devices[0], patient, torch.ones(1, 8))


@pytest.mark.parametrize(
    ("num_units", "unit_bytes"),
    [(1, 16), (512, 16), (513, 16), (CHANNELS * 2048, 16), (10**7, 2), (10**6, 4)],
)
def test_chunks_cover_a_message_and_fit_a_half(num_units: int, unit_bytes: int) -> None:
    blocks, chunk = chunks_of(num_units, unit_bytes)
    assert 1 <= blocks <= CHANNELS
    assert chunk * unit_bytes <= HALF_BYTES
    assert (blocks - 1) * chunk < num_units, "a block without a chunk would not count its exchange"


def test_mailbox_size_equals_that_of_the_kernels() -> None:
    text = (devices_of(2)[0].sources / "peers.cuh").read_text()
    for words in ("MAX_RANKS = 8;", "CHANNELS = 64;", "HALF_BYTES = 32 << 10;"):
        assert f"constexpr int {words}" in text
    assert MAILBOX_BYTES == 64 * 8 * 4 + 64 * 2 * (32 << 10)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda device, peers: all_reduce(device, peers, torch.ones(4, 8)[:, :4]), "x: expected contiguous"),
        (lambda device, peers: all_reduce(device, peers, torch.ones(1, 8), torch.ones(4)), "bias: expected"),
        (lambda device, peers: Columns(device, (3, 3), 1), "columns have"),
        (
            lambda device, peers: gather(
                device, peers, Columns(device, (2, 2), 4), 3, torch.ones(2, 2), None
            ),
            "x: expected 3 contiguous rows of 2",
        ),
        (lambda device, peers: Peers(device, 0, [1, 2, 3]), "ranks, and a rank among them"),
    ],
)
def test_invalid_tensors_are_rejected(call: Callable[[EmulatedDevice, Peers], object], words: str) -> None:
    devices = devices_of(2)
    with pytest.raises(ValueError, match=words):
        call(devices[0], peers_of(devices)[0])
