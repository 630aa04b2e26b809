"""The matrix unit (csrc/cpu/runtime/amx.hpp): its emulation in plain C++ against sums computed here, and kernels that use it.

The emulation is compared with the sums on every processor, compiled for each instruction set. On a processor with the unit,
the unit is compared with the emulation: single operations, and whole linear layers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.executor.kernels.compiled_checks import INCLUDES
from tests.executor.kernels.gguf_blocks import random_rows

from quintet.executor.backends.cpu.ops import host_library
from quintet.executor.backends.cpu.ops.host_library import (
    instruction_set,
    instruction_set_refusal,
    set_threads,
)
from quintet.executor.backends.cpu.ops.host_linear import Inputs, LinearLibrary, WeightFormat
from quintet.executor.backends.cpu.ops.linear import GatedActivation
from quintet.executor.backends.cpu.ops.packed_weight import PackedWeight

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).parent / "amx/operations.cpp"
AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    *("-mavx512vnni", "-mavx512bf16"),
)
UNITS = ("amx_emulated", "amx")
FLAGS = {
    "plain": ("-DQT_AMX_EMULATED",),
    "amx_emulated": (*AVX512, "-DQT_AMX_EMULATED"),
    "amx": (*AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
"""Plain: the generic C++ body, with the instructions that all processors of its kind have."""
SMALLEST_NORMAL = np.float32(2.0**-126)
"""The smallest normal number."""

Array = npt.NDArray[np.generic]


def flags_of_processor() -> set[str]:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


HAS = {
    "plain": True,
    "amx_emulated": platform.machine() == "x86_64" and {"avx512_bf16", "avx512_vnni"} <= flags_of_processor(),
    "amx": {"amx_bf16", "amx_int8"} <= flags_of_processor(),
}


def compiled(built: Path, name: str, *sources: Path) -> Path:
    """Compile sources for a unit into a library."""
    flags = ("-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", *FLAGS[name])
    warnings = ("-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
    command = ["g++", *flags, *warnings, f"-DQT_ISA={name}", *INCLUDES]
    subprocess.run([*command, *map(str, sources), "-o", str(built)], check=True)
    return built


@pytest.fixture(scope="module", params=list(FLAGS))
def unit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled operations of a unit; skipped if the processor cannot run them."""
    name: str = request.param
    if not HAS[name]:
        pytest.skip(f"this processor cannot run {name}")
    library = ctypes.CDLL(str(compiled(tmp_path_factory.mktemp(name) / "operations.so", name, SOURCE)))
    if name == "amx":
        assert library.permitted(), "the operating system does not grant the matrix unit"
    return library


def run(unit: ctypes.CDLL, a: Array, b: Array, c: Array, stride: int = 64) -> Array:
    """Multiply whole or partial registers: a [rows, 4 * depth bytes], b [depth, 4 * columns bytes], c [rows, columns].

    Rows are `stride` bytes apart; the bytes between them must not change.
    """
    rows, columns, depth = len(a), c.shape[1], len(b)
    memory = [np.full((16, stride), 0xA5, dtype=np.uint8) for _ in range(3)]
    for area, numbers in zip(memory, (a, b, c), strict=True):
        raw = np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), -1)
        area[: len(raw), : raw.shape[1]] = raw
    before = [area.copy() for area in memory]
    pointers = [ctypes.c_void_p(area.ctypes.data) for area in memory]
    unit.multiply(int(a.dtype == np.int8), rows, columns, depth, *pointers, ctypes.c_int64(stride))
    result = memory[2][:rows, : columns * 4].copy().view(c.dtype)
    before[2][:rows, : columns * 4] = memory[2][:rows, : columns * 4]
    assert all(np.array_equal(old, new) for old, new in zip(before, memory, strict=True))
    return result


def flushed(value: Array) -> Array:
    """Flush numbers below the smallest normal one to zero, keeping the sign."""
    return np.where(np.abs(value) < SMALLEST_NORMAL, np.copysign(np.float32(0), value), value)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of numbers with the mantissas of bf16 and fp32, rounded once to fp32.

    The product is exact in fp64. The sum is rounded to odd in fp64, by its error (Knuth's two-sum). Rounding it again to
    fp32 then rounds the exact sum (Boldo and Melquiond, 2008).
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = total.view(np.int64) % 2 == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where(np.isfinite(total) & (error != 0) & even, np.nextafter(total, towards), total)
    return odd.astype(np.float32)


def widened(bf16: Array) -> Array:
    return flushed((bf16.astype(np.uint32) << 16).view(np.float32))


def expected_bf16(a: Array, b: Array, c: Array) -> Array:
    """Multiply a [rows, 2 * depth] and b [depth, 2 * columns] as bits, as in the manual: two chains, then their sum."""
    low, high = widened(b[:, 0::2]), widened(b[:, 1::2])
    even, odd = np.zeros_like(c), np.zeros_like(c)
    for p in range(len(b)):
        even = flushed(fused(widened(a[:, 2 * p : 2 * p + 1]), low[p], even))
        odd = flushed(fused(widened(a[:, 2 * p + 1 : 2 * p + 2]), high[p], odd))
    return flushed(flushed(c) + flushed(even + odd))


def same_bits(left: Array, right: Array) -> bool:
    """Return whether all bits are equal, except for the payload of NaN."""
    either = np.isnan(left) & np.isnan(right)
    return bool(np.all(either | (left.view(np.uint32) == right.view(np.uint32))))


def numbers_of(exponents: tuple[int, int]) -> Callable[[np.random.Generator, tuple[int, int]], Array]:
    """Draw bf16 with biased exponents in a range: 0 includes denormals, 255 NaN and infinity."""

    def draw(random: np.random.Generator, shape: tuple[int, int]) -> Array:
        sign, mantissa = random.integers(0, 2, shape), random.integers(0, 128, shape)
        mantissa[random.random(shape) < 0.2] = 0
        exponent = random.integers(exponents[0], exponents[1] + 1, shape)
        return (sign << 15 | exponent << 7 | mantissa).astype(np.uint16)

    return draw


KINDS = {
    "near one": numbers_of((120, 132)),
    "products about the smallest normal number": numbers_of((58, 68)),
    "below the smallest normal number": numbers_of((0, 2)),
    "sums above the largest number": numbers_of((185, 194)),
    "any": numbers_of((0, 254)),
    "with infinities and NaN": numbers_of((240, 255)),
}
SHAPES = [(16, 16, 16), (16, 16, 1), (1, 16, 16), (5, 7, 3), (15, 1, 16), (16, 9, 12), (1, 1, 1)]
"""Rows, columns, pairs or quadruples."""


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_bf16(unit: ctypes.CDLL, kind: str) -> None:
    random = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        for rows, columns, depth in SHAPES * 3:
            a, b = KINDS[kind](random, (rows, 2 * depth)), KINDS[kind](random, (depth, 2 * columns))
            start = widened(KINDS[kind](random, (rows, columns)))
            start *= np.float32(random.random() + 0.5)
            got = run(unit, a, b, start, 64 if depth == 16 else 192)
            assert same_bits(got, expected_bf16(a, b, start)), (rows, columns, depth)


def test_products_of_bytes(unit: ctypes.CDLL) -> None:
    """Exact modulo 2^32, the first factor signed, the second unsigned."""
    random = np.random.default_rng(2)
    for rows, columns, depth in SHAPES:
        for extreme in (False, True):
            a = random.integers(-128, 128, (rows, 4 * depth)).astype(np.int8)
            b = random.integers(0, 256, (depth, 4 * columns)).astype(np.uint8)
            if extreme:
                a[:], b[:] = -128, 255
            c = random.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32)
            by_column = b.reshape(depth, columns, 4).transpose(1, 0, 2).reshape(columns, -1)
            exact = c.astype(np.int64) + a.astype(np.int64) @ by_column.T.astype(np.int64)
            wrapped = ((exact + 2**31) % 2**32 - 2**31).astype(np.int32)
            assert np.array_equal(run(unit, a, b, c, 80), wrapped)


def test_registers_are_cleared(unit: ctypes.CDLL) -> None:
    numbers, out = np.full(1024, 7, dtype=np.uint8), np.full(2048, 9, dtype=np.uint8)
    unit.clear(ctypes.c_void_p(numbers.ctypes.data), ctypes.c_void_p(out.ctypes.data))
    assert not out.any()


# --- checked once, when an instruction set is selected ---


def known_products() -> int:
    """Return the digest of csrc/cpu/kernels/matrix_products.hpp, from the sums of this file."""
    state, digest, mask = 1, 0xCBF29CE484222325, 2**64 - 1

    def draw() -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) & mask
        return state >> 32

    def number(least: int, count: int) -> int:
        bits = draw()
        return (bits & 0x80000000) >> 16 | (least + (bits >> 8 & 0xFFFF) % count) << 7 | bits & 0x7F

    def factors(least: int, count: int) -> Array:
        return np.array([number(least, count) for _ in range(512)], np.uint16).reshape(16, 32)

    def words() -> Array:
        return np.array([draw() for _ in range(256)], np.uint32).reshape(16, 16)

    def note(c: Array) -> None:
        nonlocal digest
        for word in c.view(np.uint32).ravel().tolist():
            digest = (digest ^ word) * 0x100000001B3 & mask

    for rows, columns, depth in (16, 16, 16), (5, 7, 3), (16, 9, 12):
        for factor, sums in ((120, 13), (120, 13)), ((58, 11), (0, 10)), ((0, 3), (0, 3)):
            a, b = factors(*factor), factors(*factor)
            start = [number(*sums) << 16 | draw() >> 16 for _ in range(256)]
            c = np.array(start, np.uint32).reshape(16, 16).view(np.float32)
            part = c[:rows, :columns]
            for _ in range(2):
                part[:] = expected_bf16(a[:rows, : 2 * depth], b[:depth, : 2 * columns], part.copy())
            note(c)
        left, right, c = words().view(np.int8), words().view(np.uint8), words()
        by_column = right[:depth, : 4 * columns].reshape(depth, columns, 4).transpose(1, 0, 2)
        products = left[:rows, : 4 * depth].astype(np.int64) @ by_column.reshape(columns, -1).T.astype(
            np.int64
        )
        c[:rows, :columns] = (c[:rows, :columns] + 2 * products) % 2**32
        note(c)
    return digest


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The selection of an instruction set, with a faulty unit instead of the emulated one."""
    if not HAS["amx_emulated"]:
        pytest.skip("this processor cannot run amx_emulated")
    built = tmp_path_factory.mktemp("faulty") / "faulty.so"
    return compiled(
        built, "amx_emulated", SOURCE.with_name("faulty.cpp"), ROOT / "csrc/cpu/runtime/dispatch.cpp"
    )


def test_wrong_products_are_detected(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(compiled(tmp_path / "faulty.so", "plain", SOURCE.with_name("faulty.cpp"))))
    for function in library.digest, library.right:
        function.restype = ctypes.c_uint64
    digests = [library.digest(fault) for fault in range(library.num_faults())]
    assert digests[0] == library.right() == known_products()
    assert len(set(digests)) == len(digests)


def test_a_unit_with_wrong_products_is_not_used(faulty: Path) -> None:
    tell = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1])\n"
        "for function in library.qt_isa, library.qt_isa_refusal:\n"
        "    function.restype = ctypes.c_char_p; print(function().decode())"
    )
    run = subprocess.run(
        [sys.executable, "-c", tell, str(faulty)],
        env={**os.environ, "QUINTET_ISA": "amx_emulated"},
        capture_output=True,
        text=True,
        check=True,
    )
    name, why = run.stdout.splitlines()
    assert name in {"avx512_bf16", "amx"}
    assert why.startswith(
        "amx_emulated: products of known numbers have not the bits that the processor's manual says"
    )


@pytest.mark.skipif(not HAS["amx"], reason="this processor has no matrix unit")
@pytest.mark.whole
def test_attention_has_the_same_bits_with_unit_and_emulation() -> None:
    """Heads with a full or half-empty last step, one row and many, both kinds of cache."""
    answers = [
        subprocess.run(
            [sys.executable, "-m", "tests.executor.kernels.amx.attention"],
            env={**os.environ, "QUINTET_ISA": name},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for name in UNITS
    ]
    assert [answer[0] for answer in answers] == list(UNITS), "the requested instruction sets were not used"
    assert len(answers[0]) > 1
    assert answers[0][1:] == answers[1][1:]


# --- linear layers ---

INTEGERS = [
    (WeightFormat.INT8, 0, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT8, 0, Inputs.EIGHT_BITS),
    (WeightFormat.INT8, 32, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT8, 64, Inputs.EIGHT_BITS),
    (WeightFormat.INT4, 32, Inputs.EIGHT_BITS_IN_GROUPS),
    (WeightFormat.INT4, 64, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT4, 128, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT4_ZEROS, 128, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT8_ZEROS, 64, Inputs.EIGHT_BITS),
    (WeightFormat.INT4, 16, Inputs.SIXTEEN_BITS),
    (WeightFormat.INT4_SINGLE_ZEROS, 64, Inputs.SIXTEEN_BITS),
    (WeightFormat.Q2_K, 0, Inputs.SIXTEEN_BITS),
    (WeightFormat.Q3_K, 0, Inputs.EIGHT_BITS_IN_GROUPS),
    (WeightFormat.Q4_K, 0, Inputs.EIGHT_BITS_IN_GROUPS),
    (WeightFormat.Q4_K, 0, Inputs.SIXTEEN_BITS),
    (WeightFormat.Q5_1, 0, Inputs.SIXTEEN_BITS),
    (WeightFormat.Q6_K, 0, Inputs.SIXTEEN_BITS),
    (WeightFormat.IQ4_XS, 0, Inputs.SIXTEEN_BITS),
    (WeightFormat.MXFP4, 0, Inputs.SIXTEEN_BITS),
]
"""Format, group, precision of x."""
DEPTHS = (1100, 64, 70, 33, 4)
"""Four slices and a partial group; whole steps; a partial step; slightly more, and less, than one step."""
BLOCK_DEPTHS = (1280, 256)
"""Input dimension of formats with blocks of 256."""
FORMATS = [(WeightFormat.BF16, 0, Inputs.SIXTEEN_BITS), *INTEGERS]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ctypes.CDLL]]:
    """Kernels of each tested instruction set, in this process: a library selects once, so each is a copy of the file."""
    path = Path(host_library.__file__).with_name(f"_host{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not path.exists() or not HAS["amx_emulated"]:
        pytest.skip("the host kernels are not built, or this processor cannot run them")
    loaded = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("avx512_bf16", *(unit for unit in UNITS if HAS[unit])):
            patch.setenv("QUINTET_ISA", name)
            copy = tmp_path_factory.mktemp(name) / path.name
            copy.write_bytes(path.read_bytes())
            loaded[name] = ctypes.CDLL(str(copy))
            assert instruction_set(loaded[name]) == name, f"{path}: {instruction_set_refusal(loaded[name])}"
    yield loaded
    for library in loaded.values():
        set_threads(library, 1, False)  # idle threads of a copy would spin


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def pack(
    library: ctypes.CDLL, weight: torch.Tensor, form: WeightFormat, group: int = 0, paired: bool = False
) -> PackedWeight:
    packed = PackedWeight(LinearLibrary(library), form, *weight.shape, group=group, paired=paired)
    if form.has_own_group:
        packed.fill_blocks(random_rows(form, *weight.shape)[0])
    elif form.has_singles:
        codes, scales = weight.float().abs().mul(5).clamp(max=15).byte(), weight[:, ::group].float()
        packed.fill_codes(codes, scales, 7.5 + scales)
    else:
        packed.fill(weight)
    return packed


def outputs(library: ctypes.CDLL, form: WeightFormat, group: int, inputs: Inputs) -> list[torch.Tensor]:
    """Return products for all depths at row counts around those of units; columns fill a tile, or end within a register."""
    results = []
    for depth in BLOCK_DEPTHS if form.has_own_group else DEPTHS:
        for columns, rows, paired in (
            (70, 40, False),
            (130, 9, False),
            (66, 17, True),
            (64, 33, False),
            (20, 7, False),
        ):
            packed = pack(library, noise(columns, depth), form, group, paired)
            activation = GatedActivation.SILU_AND_MUL if paired else GatedActivation.NONE
            bias = noise(columns, seed=2)
            x = noise(rows, depth, seed=1)
            results.append(packed.linear(x, bias, activation=activation, inputs=inputs).view(torch.int16))
    return results


@pytest.mark.parametrize(("form", "group", "inputs"), INTEGERS)
def test_integers_have_the_same_bits_without_the_unit(
    libraries: dict[str, ctypes.CDLL], form: WeightFormat, group: int, inputs: Inputs
) -> None:
    expected = outputs(libraries["avx512_bf16"], form, group, inputs)
    for name in libraries.keys() & set(UNITS):
        results = outputs(libraries[name], form, group, inputs)
        assert all(torch.equal(*pair) for pair in zip(expected, results, strict=True)), name


def test_denormal_products_of_integers_are_zero_in_every_kernel(libraries: dict[str, ctypes.CDLL]) -> None:
    """Only AVX512_BF16 converts to bf16 in one instruction, and several kernels multiply integers."""
    x = noise(40, 64, seed=1) * 3e-19
    for library in libraries.values():
        packed = pack(library, noise(70, 64) * 1e-19, WeightFormat.INT8)
        bits = torch.cat([packed.linear(x), packed.linear(x[:1])]).view(torch.int16).int() & 0x7FFF
        assert torch.equal(bits[0], bits[-1])
        assert (bits > 0).any() and ((bits == 0) | (bits >= 0x80)).all()


@pytest.mark.skipif(not HAS["amx"], reason="this processor has no matrix unit")
@pytest.mark.parametrize(("form", "group", "inputs"), FORMATS)
def test_linear_layers_have_the_same_bits_with_unit_and_emulation(
    libraries: dict[str, ctypes.CDLL], form: WeightFormat, group: int, inputs: Inputs
) -> None:
    units = [outputs(libraries[name], form, group, inputs) for name in UNITS]
    assert all(torch.equal(*pair) for pair in zip(*units, strict=True))


@pytest.mark.parametrize(("depth", "slices"), [(1100, 256), (70, 70), (1, 1)])
def test_bf16_is_multiplied_step_by_step(libraries: dict[str, ctypes.CDLL], depth: int, slices: int) -> None:
    """Steps of 32 k ascending, each as the unit computes it; slices of k from zero, then their sums, ascending."""
    columns, rows = 70, 36
    weight, x = noise(columns, depth), noise(rows, depth, seed=1)
    total: Array | None = None
    for begin in range(0, depth, slices):
        sums: Array = np.zeros((rows, columns), dtype=np.float32)
        for k in range(begin, min(begin + slices, depth), 32):
            part = slice(k, min(k + 32, begin + slices, depth))
            padded_x, padded_weight = np.zeros((rows, 32), np.uint16), np.zeros((columns, 32), np.uint16)
            padded_x[:, : part.stop - k] = x[:, part].view(torch.uint16).numpy()
            padded_weight[:, : part.stop - k] = weight[:, part].view(torch.uint16).numpy()
            pairs = padded_weight.reshape(columns, 16, 2).transpose(1, 0, 2).reshape(16, -1)
            sums = expected_bf16(padded_x, pairs, sums)
        total = sums if total is None else total + sums
    assert total is not None
    expected = torch.from_numpy(total).to(torch.bfloat16)
    for name in libraries.keys() & set(UNITS):
        got = pack(libraries[name], weight, WeightFormat.BF16).linear(x)
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), name


@pytest.mark.parametrize(("form", "group", "inputs"), [FORMATS[0], FORMATS[2], FORMATS[6]])
def test_a_row_has_the_same_bits_at_every_number_of_rows(
    libraries: dict[str, ctypes.CDLL], form: WeightFormat, group: int, inputs: Inputs
) -> None:
    """From 1 to 200 rows, in full and partial tiles, on one to three threads and on more threads than tiles."""
    for name in libraries.keys() & set(UNITS):
        library = libraries[name]
        packed = pack(library, noise(70, 288), form, group)
        x = noise(200, 288, seed=1)
        whole = packed.linear(x, inputs=inputs).view(torch.int16)
        for rows in range(1, 200):
            if rows in (1, 50, 60, 70):
                set_threads(library, {1: 1, 50: 2, 60: 3, 70: 12}[rows], False)
            begin = rows * 7 % (201 - rows)
            part = packed.linear(x[begin : begin + rows], inputs=inputs).view(torch.int16)
            assert torch.equal(part, whole[begin : begin + rows]), (name, rows)


def test_rows_of_x_may_have_any_address_and_stride(libraries: dict[str, ctypes.CDLL]) -> None:
    """Rows at a stride and at odd addresses; bytes between and after them are not read."""
    for name in libraries.keys() & set(UNITS):
        packed = pack(libraries[name], noise(40, 70), WeightFormat.BF16)
        around = torch.full((40, 101), float("nan"), dtype=torch.bfloat16)
        around[:, 3:73] = noise(40, 70, seed=1)
        out = packed.linear(around[:, 3:73])
        assert torch.equal(out, packed.linear(around[:, 3:73].contiguous()))
        assert not out.isnan().any()
