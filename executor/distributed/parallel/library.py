"""Bindings of the ranks' shared memory; ``csrc/cpu/ranks/ranks.hpp`` and ``rank_ops.cpp`` document the arguments."""

from __future__ import annotations

import ctypes
import mmap
import os
from enum import IntEnum

from quintet.executor.backends.cpu.ops.host_library import check_layout, declare, open_library
from quintet.wire.errors import ConfigError

PAIR_BYTES = 8
"""Size of a pair of block ids, int32."""
_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class OrderKind(IntEnum):
    """Kinds of orders from the leader to the followers."""

    RUN = 0
    """Run operations of the program over the step that the order contains."""
    COPY_BLOCKS = 1
    """Copy blocks of KV memory: int32 pairs of source and target."""
    SWAP_OUT = 2
    """Copy blocks to host memory; see `quintet.wire.step.StepPlan.swaps_out`."""
    SWAP_IN = 3
    """Copy blocks back from host memory."""
    EMBEDS = 4
    """Write input embeddings over the embedding layer's output; see `vector_records`."""
    IDLE_TASK = 5
    """Run an idle task."""
    MOVE_EXPERT = 6
    """Copy a chunk of an expert between ranks; see `quintet.executor.distributed.parallel.expert_copies`."""
    CARRY_OUT = 8
    """Copy parts of blocks to the gather memory: int32 pairs of block and row.

    See `quintet.executor.distributed.parallel.whole_blocks`.
    """
    CARRY_IN = 9
    """Copy parts of blocks back from the gather memory."""
    ON_DEVICE = 7
    """Run a GPU operation of `quintet.executor.backends.cuda.ranks.rank_broadcast`."""


class StepPart(IntEnum):
    """Boundaries of the parts of a step that a stage can run: layers, then logits of some tokens."""

    LAYERS = 0
    LOGITS = 1
    END = 2


class Note(IntEnum):
    """Kinds of notes about a rank; ``qt::Note``."""

    PROGRESS = 0
    """Work done so far: no growth during a step means a hang."""
    IDLE_TASKS = 1
    """Number of idle tasks left."""


class CRanksShape(ctypes.Structure):
    """The layout of ``qt::RanksShape``, which documents the fields."""

    _fields_ = (
        ("ranks", _SIZE),
        ("max_tokens", _SIZE),
        ("max_rows", _SIZE),
        ("max_outputs", _SIZE),
        ("tables", _SIZE),
        ("slots", _SIZE),
        ("table_stride", _SIZE),
        ("block_size", _SIZE),
        ("sums_width", _SIZE),
        ("logits_row_bytes", _SIZE),
        ("rotated_row_bytes", _SIZE),
        ("gathered_row_bytes", _SIZE),
        ("experts_row_bytes", _SIZE),
        ("staging_bytes", _SIZE),
        ("depth", _SIZE),
        ("payload_bytes", _SIZE),
        ("kv_bytes", _SIZE),
        ("kv_copies", _SIZE),
        ("query_row_bytes", _SIZE),
        ("partial_floats", _SIZE),
        ("adapters", _SIZE),
    )


class COrder(ctypes.Structure):
    """The layout of ``qt::Order``, which documents the fields."""

    _fields_ = (
        ("kind", _SIZE),
        ("begin", _SIZE),
        ("end", _SIZE),
        ("length", _SIZE),
        ("num_tokens", _SIZE),
        ("num_rows", _SIZE),
        ("num_outputs", _SIZE),
    )


class CLeft(ctypes.Structure):
    """The layout of ``qt::Left``, which documents the fields."""

    _fields_ = (
        ("offset", _SIZE),
        ("row_bytes", _SIZE),
        ("stride", _SIZE),
        ("rows", _SIZE),
        ("for_first", _SIZE),
    )


class RanksLibrary:
    """The library's functions with their C types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layout(library, "qt_ranks_shape_bytes", ctypes.sizeof(CRanksShape))
        check_layout(library, "qt_ranks_order_bytes", ctypes.sizeof(COrder))
        check_layout(library, "qt_ranks_left_bytes", ctypes.sizeof(CLeft))
        a, n, i = _ADDRESS, _SIZE, _INT
        self.num_bytes = declare(library, "qt_ranks_bytes", a, result=n)
        self.new = declare(library, "qt_ranks_new", a, a, n, i, result=a)
        self.send = declare(library, "qt_ranks_send", a, a, a)
        self.receive = declare(library, "qt_ranks_receive", a, a, a)
        self.done = declare(library, "qt_ranks_done", a)
        self.done_with = declare(library, "qt_ranks_done_with", a, n)
        self.wait_for_done = declare(library, "qt_ranks_wait_for_done", a, n)
        self.pack_step = declare(library, "qt_ranks_pack_step", a, a, a, result=n)
        self.unpack_step = declare(library, "qt_ranks_unpack_step", a, a, ctypes.c_char_p, n, result=i)
        self.step_bytes = int(declare(library, "qt_step_bytes", result=n)())
        self.wait_for_all = declare(library, "qt_ranks_wait_for_all", a)
        self.logits = declare(library, "qt_ranks_logits", a, result=a)
        self.rotated = declare(library, "qt_ranks_rotated", a, result=a)
        self.make_room = declare(library, "qt_ranks_make_room", a)
        self.wait_for_sent = declare(library, "qt_ranks_wait_for_sent", a, n)
        self.note = declare(library, "qt_ranks_note", a, n, ctypes.c_uint64)
        self.noted = declare(library, "qt_ranks_noted", a, n, result=ctypes.c_uint64)
        self.payload = declare(library, "qt_ranks_payload", a, result=a)
        self.barrier_now = declare(library, "qt_ranks_barrier", a)
        self.wait_for_arrival = declare(library, "qt_ranks_wait_for_barrier", a, n, n, n)
        self.reach_barrier = declare(library, "qt_ranks_reach_barrier", a, n)
        self.left = declare(library, "qt_ranks_left", a, n, a)
        self.staging = declare(library, "qt_ranks_staging", a, result=a)
        self.kv = declare(library, "qt_ranks_kv", a, n, result=a)
        self.queries = declare(library, "qt_ranks_queries", a, n, n, result=a)
        self.items = declare(library, "qt_ranks_items", a, result=a)
        self.item_ints = int(declare(library, "qt_ranks_item_ints", result=n)())
        self.sums = declare(library, "qt_ranks_sums", a, n, n, result=a)
        self.gathered = declare(library, "qt_ranks_gathered", a, n, n, result=a)
        self.linear_sums = declare(library, "qt_program_linear_sums", a, a, a, n, n, i, a, n, i)
        self.experts_sums = declare(library, "qt_program_experts_sums", a, a, a, n, a, n, n, a, n, i)
        self.experts = declare(library, "qt_program_experts_of_ranks", a, a, a, a, n, a, n, n, a, a, n, i)
        self.barrier = declare(library, "qt_program_meet", a, a, i, a, n, n, i)
        self.attention = declare(library, "qt_program_context_attention", a, a, a, a, n, a, a, n, n)
        self.add_sums = declare(library, "qt_program_add_sums", a, a, n, n, a, a, a, n, i)


def open_ranks_library() -> RanksLibrary:
    """Return the library. Raises `ConfigError` if it is not built."""
    library = open_library()
    if library is None:
        raise ConfigError(
            "--tensor-parallel-size and --pipeline-parallel-size need Quintet's host kernels, and they are not built:"
            " install a C++ compiler (g++ or clang++) and reinstall Quintet, or drop the flags"
        )
    return RanksLibrary(library)


class RanksMemory:
    """The memory that ranks share, mapped into this process."""

    def __init__(self, library: RanksLibrary, descriptor: int, shape: CRanksShape) -> None:
        """descriptor: of the memory, which is extended to the size of ``shape``; initially zero."""
        num_bytes = int(library.num_bytes(ctypes.byref(shape)))
        os.ftruncate(descriptor, num_bytes)
        self.mapped = mmap.mmap(descriptor, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))
