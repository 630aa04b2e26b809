"""Load ranks' shares of checkpoints with unreadable pages: a program, since reading such a page ends the process.

It takes a list of `Fenced` from standard input, loads each in its own process, and prints each exit.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from unittest import mock

import msgspec

from quintet.executor import loading
from quintet.executor.backends.platforms.platform import open_platform
from quintet.executor.checkpoints.weights.mapped import MappedFile, WeightFile
from quintet.executor.distributed.parallel.ranks import share_of_rank
from quintet.wire.config import EngineConfig

Ranges = Sequence[tuple[int, int]]
"""Byte ranges, half-open."""


class Fenced(msgspec.Struct, frozen=True):
    """A rank, and the bytes that it may not read."""

    config: EngineConfig
    rank: int
    unkept: Mapping[str, Ranges]
    """Byte ranges by tensor name."""


class Ending(msgspec.Struct, frozen=True):
    """The exit of one process."""

    status: int
    """0 after a load, a negative signal number after a signal."""
    num_fenced_bytes: int


def pages_within(ranges: Ranges) -> list[tuple[int, int]]:
    """Return the pages with all their bytes in the ranges, adjacent pages joined."""
    joined: list[list[int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    page = mmap.PAGESIZE
    whole = ((-(-begin // page) * page, end // page * page) for begin, end in joined)
    return [(begin, end) for begin, end in whole if begin < end]


def unkept_pages(file: MappedFile, unkept: Mapping[str, Ranges]) -> list[tuple[int, int]]:
    """Return the pages of a file that contain only forbidden bytes."""
    begins = {name: file.entries[name].begin for name in unkept if name in file.entries}
    return pages_within(
        [*chain(*([(at + a, at + b) for a, b in unkept[name]] for name, at in begins.items()))]
    )


def fence(file: MappedFile, pages: Ranges) -> None:
    """Make reads of these pages end the process."""
    name = next(iter(file))
    address = file.tensor(name).data_ptr() - file.entries[name].begin
    libc = ctypes.CDLL(None, use_errno=True)
    for begin, end in pages:
        if libc.mprotect(ctypes.c_void_p(address + begin), ctypes.c_size_t(end - begin), 0):
            raise OSError(ctypes.get_errno(), "mprotect")


def load(each: Fenced) -> None:
    """Load the rank's share as its process does."""
    opened = loading.open_files

    def open_fenced(folder: Path) -> list[WeightFile]:
        files = opened(folder)
        for file in files:
            assert isinstance(file, MappedFile)
            fence(file, unkept_pages(file, each.unkept))
        return files

    with mock.patch.object(loading, "open_files", open_fenced):
        config = each.config
        loading.load_model(config, open_platform(config.executor), share=share_of_rank(config, each.rank))


def ending_of(each: Fenced) -> Ending:
    """Load in a child process, and return its exit."""
    child = os.fork()
    if not child:
        status = 1
        try:
            load(each)
            status = 0
        except Exception:  # noqa: BLE001 - the parent continues with the next for any error
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    files = [MappedFile(path) for path in Path(each.config.model.path).glob("*.safetensors")]
    fenced = chain(*(unkept_pages(file, each.unkept) for file in files))
    return Ending(status, sum(end - begin for begin, end in fenced))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()  # prints the stack of the read
    requested = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Fenced])
    print(msgspec.json.encode([ending_of(each) for each in requested]).decode())
