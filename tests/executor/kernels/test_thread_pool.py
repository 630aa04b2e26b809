"""What the threads of csrc/cpu keep to themselves: how long each spins before it sleeps, and what it counts."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
from tests.executor.kernels.compiled_checks import INCLUDES, KERNELS, NATIVE, run

SOURCES = (Path(__file__).parent / "pool/checks.cpp", KERNELS / "runtime/cores.cpp")
MOST, FEWEST = 4000, 400
"""Spins before sleep: of a pool that has a processor for each thread, and however short waits have been."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which(NATIVE[0]) is None:
        pytest.skip(f"needs the compiler {NATIVE[0]}")
    built = tmp_path_factory.mktemp("pool") / "checks.so"
    flags = ("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", *INCLUDES)
    run(*NATIVE, *flags, *map(str, SOURCES), "-o", str(built))
    library = ctypes.CDLL(str(built))
    library.counted.restype = ctypes.c_uint64
    library.counted.argtypes = (ctypes.c_int, ctypes.c_int64)
    return library


def learnt(pool: ctypes.CDLL, spins: int, endless: int = 0, most: int = MOST) -> list[int]:
    """Spins before sleep: at first, after many waits of so many spins, and after some that had no end."""
    out = (ctypes.c_int * 3)()
    pool.learn(most, spins, endless, out)
    return list(out)


def test_a_thread_spins_twice_as_long_as_its_waits_have_taken(pool: ctypes.CDLL) -> None:
    at_first, learned, _ = learnt(pool, 900)
    assert at_first == 1000
    assert 2 * 880 <= learned <= 2 * 900


def test_but_not_for_less_than_wakes_it_nor_for_ever(pool: ctypes.CDLL) -> None:
    assert learnt(pool, 3)[1] == FEWEST
    assert learnt(pool, 390, most=600)[1] == 600


def test_waits_without_end_are_slept_through(pool: ctypes.CDLL) -> None:
    """Eight of them have a quarter of the patience off each: a thread that nobody needs gives its processor away."""
    _, learned, after = learnt(pool, 900, endless=8)
    assert after == FEWEST < learned


@pytest.mark.parametrize("threads", [1, 3, 300])
def test_threads_count_each_piece_once(pool: ctypes.CDLL, threads: int) -> None:
    """Those beyond the lines that there are share some."""
    assert pool.counted(threads, 1000) == 20 * 1000


def test_threads_count_on_lines_of_their_own(pool: ctypes.CDLL) -> None:
    out = (ctypes.c_int * 2)()
    pool.lie(out)
    assert tuple(out) == (64, 0)
