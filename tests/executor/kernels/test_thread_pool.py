"""Internals of the thread pool of csrc/cpu: spins before a thread sleeps, and counts of tasks."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
from tests.executor.kernels.compiled_checks import INCLUDES, KERNELS, NATIVE, run

SOURCES = (Path(__file__).parent / "pool/checks.cpp", KERNELS / "runtime/cores.cpp")
MAX_SPINS, MIN_SPINS = 4000, 400
"""Spins before sleep: of a pool with a processor for each thread, and the minimum."""


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


def spins_before_sleep(
    pool: ctypes.CDLL, spins: int, endless: int = 0, max_spins: int = MAX_SPINS
) -> list[int]:
    """Return the spins before sleep: at first, after many waits of ``spins`` spins, and after ``endless`` waits without end."""
    out = (ctypes.c_int * 3)()
    pool.learn(max_spins, spins, endless, out)
    return list(out)


def test_a_thread_spins_twice_as_long_as_recent_waits(pool: ctypes.CDLL) -> None:
    at_first, learned, _ = spins_before_sleep(pool, 900)
    assert at_first == 1000
    assert 2 * 880 <= learned <= 2 * 900


def test_spins_have_a_minimum_and_a_maximum(pool: ctypes.CDLL) -> None:
    assert spins_before_sleep(pool, 3)[1] == MIN_SPINS
    assert spins_before_sleep(pool, 390, max_spins=600)[1] == 600


def test_endless_waits_reduce_the_spins(pool: ctypes.CDLL) -> None:
    """Each of eight endless waits reduces the limit by a quarter: an idle thread then yields its processor."""
    _, learned, after = spins_before_sleep(pool, 900, endless=8)
    assert after == MIN_SPINS < learned


@pytest.mark.parametrize("threads", [1, 3, 300])
def test_each_task_is_counted_once(pool: ctypes.CDLL, threads: int) -> None:
    """Threads beyond the number of counter lines share some."""
    assert pool.counted(threads, 1000) == 20 * 1000


def test_thread_counters_are_on_separate_cache_lines(pool: ctypes.CDLL) -> None:
    out = (ctypes.c_int * 2)()
    pool.counter_layout(out)
    assert tuple(out) == (64, 0)


def test_no_thread_reads_a_call_after_its_run(pool: ctypes.CDLL) -> None:
    """A thread may be suspended while it looks ahead in the arguments of a later work."""
    assert pool.late_looks(4) == 0
