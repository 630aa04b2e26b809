"""Packed weights filled with GGUF blocks: exact dequantization, and products.

Bounds: x in 16 bits is off by 2^-16 of its group's largest magnitude. fp32 sums of groups, of centred integers and of minima,
are off by 2^-24 for each group of the sum of magnitudes, which is less than four times the largest weight's for each k.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.executor.kernels.gguf_blocks import BLOCKS, group_of, random_rows
from tests.executor.kernels.instruction_sets import instruction_sets

from quintet.executor.backends.cpu.ops.host_library import declare, open_library
from quintet.executor.backends.cpu.ops.host_linear import Inputs, LinearLibrary, WeightFormat, linear_library
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight, PackedWeightError

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

forms = pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    set_threads(2)
    yield
    set_threads(1)


def set_threads(count: int) -> None:
    library = open_library()
    assert library is not None
    declare(library, "qt_set_threads", ctypes.c_int, ctypes.c_int)(count, 0)


def kernels() -> LinearLibrary:
    library = linear_library()
    assert library is not None
    return library


def empty(form: WeightFormat, columns: int, depth: int, paired: bool = False) -> PackedWeight:
    return PackedWeight(kernels(), form, columns, depth, group=group_of(form), paired=paired)


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@forms
@pytest.mark.parametrize("paired", [False, True])
def test_blocks_are_dequantized_exactly(form: WeightFormat, paired: bool) -> None:
    """Parts in any order and strided in their source; the embedding of a row is the same.

    Blocks of 32 are processed eight at a time: three full batches, and one block.
    """
    columns, depth = 150, 768 + form.block(group_of(form))[0] % 256
    blocks, numbers = random_rows(form, columns, depth)
    wide = torch.zeros(columns, blocks.shape[1] + 5, dtype=torch.uint8)
    wide[:, : blocks.shape[1]] = blocks
    weight = empty(form, columns, depth, paired)
    for begin, end in ((100, 150), (0, 30), (30, 100)):
        weight.fill_blocks(wide[begin:end, : blocks.shape[1]], begin)
    assert torch.equal(weight.read(), numbers)


@forms
def test_products_of_blocks(form: WeightFormat) -> None:
    """Row counts that multiply packed codes, and those that unpack them to bytes."""
    columns, depth = 70, 1280
    blocks, numbers = random_rows(form, columns, depth)
    weight = empty(form, columns, depth)
    weight.fill_blocks(blocks)
    exact = numbers.double()
    largest = exact.abs().amax(1) * depth * 4 * (depth / 16) * 2**-24
    for rows in (1, 2, 3, 4, 5, 13, 40):
        x, bias = noise(rows, depth), noise(columns, seed=2)
        expected = x.double() @ exact.T + bias.double()
        for inputs in Inputs:
            step = 2**-16 if inputs is Inputs.SIXTEEN_BITS else 2**-8
            out = weight.linear(x, bias, inputs=inputs)
            bound = (
                x.double().abs().amax(1, keepdim=True) * (step * 1.02 * exact.abs().sum(1) + largest) + 1e-6
            )
            assert bool(((out.double() - expected).abs() <= bound).all()), (rows, inputs)


@forms
@pytest.mark.parametrize("inputs", Inputs)
@pytest.mark.parametrize("paired", [False, True])
def test_blocks_have_the_same_bits_in_every_batch(form: WeightFormat, inputs: Inputs, paired: bool) -> None:
    """Alone and among others, on 1, 2 and 40 threads, which split tiles and k."""
    columns, depth = 140, 2304
    blocks, _ = random_rows(form, columns, depth)
    weight = empty(form, columns, depth, paired)
    weight.fill_blocks(blocks)
    x = noise(200, depth)
    activation = GatedActivation.SILU_AND_MUL if paired else GatedActivation.NONE

    def compute(begin: int, end: int) -> torch.Tensor:
        part = x[begin:end]
        return weight.linear(part, activation=activation, inputs=inputs).view(torch.int32)

    whole = compute(0, 200)
    for count in (1, 2, 40):
        set_threads(count)
        for begin, end in ((0, 200), (0, 1), (5, 7), (9, 12), (100, 104), (3, 9), (7, 30), (130, 200)):
            assert torch.equal(compute(begin, end), whole[begin:end]), (count, begin, end)


@forms
@pytest.mark.parametrize("inputs", Inputs)
def test_few_rows_have_the_bits_of_single_rows(form: WeightFormat, inputs: Inputs) -> None:
    """Every number of rows up to 16, as drafts are verified, on items of 64 to 16 columns."""
    columns, depth = 140, 768
    weight = empty(form, columns, depth)
    weight.fill_blocks(random_rows(form, columns, depth)[0])
    x = noise(16, depth)
    single = torch.cat([weight.linear(row[None], inputs=inputs).view(torch.int32) for row in x])
    for count in (1, 3, 12):
        set_threads(count)
        for begin in range(16):
            few = weight.linear(x[begin:], inputs=inputs).view(torch.int32)
            assert torch.equal(few, single[begin:]), (count, begin)


@pytest.mark.whole
def test_instruction_sets_give_the_same_bits() -> None:
    """All with fused multiply-add, which the baseline lacks."""
    library = open_library()
    assert library is not None
    names = [name for name in instruction_sets(library) if name != "baseline"]
    answers = {}
    for name in names:
        run = subprocess.run(
            [sys.executable, "-m", "tests.executor.kernels.gguf_blocks"],
            env={**os.environ, "QUINTET_ISA": name},
            capture_output=True,
            text=True,
            check=True,
        )
        used, answers[name] = run.stdout.split()
        assert used == name
    assert len(set(answers.values())) <= 1, answers


def test_invalid_blocks_are_rejected() -> None:
    blocks, _ = random_rows(WeightFormat.Q4_K, 64, 512)
    weight = empty(WeightFormat.Q4_K, 64, 512)
    with pytest.raises(PackedWeightError, match="expected uint8"):
        weight.fill_blocks(blocks[:, :-1])
    with pytest.raises(PackedWeightError, match="expected uint8"):
        weight.fill_blocks(blocks.to(torch.int8))
    with pytest.raises(PackedWeightError, match="columns 1 to 65"):
        weight.fill_blocks(blocks, 1)
    with pytest.raises(PackedWeightError, match="Q4_K"):
        weight.fill(torch.zeros(64, 512))
    with pytest.raises(PackedWeightError, match="Q4_K"):
        weight.fill_codes(torch.zeros(64, 512, dtype=torch.uint8), torch.ones(64, 16))
    with pytest.raises(PackedWeightError, match="whole blocks"):
        empty(WeightFormat.Q4_K, 64, 300)
    with pytest.raises(PackedWeightError, match="groups of 64"):
        PackedWeight(kernels(), WeightFormat.INT4, 64, 512, group=64).fill_blocks(blocks)
    with pytest.raises(PackedWeightError, match="multiple of the block size"):
        PackedWeight(kernels(), WeightFormat.INT4, 64, 500, group=32).fill_blocks(blocks)
