"""What ranks share, as the kernel library has it: ``csrc/cpu/ranks.hpp`` and ``rank_ops.cpp`` say what each argument is."""

from __future__ import annotations

import ctypes
import mmap
import os
from enum import IntEnum

from quintet.executor.backends.cpu.ops.host_library import check_layout, declare, open_library
from quintet.wire.errors import ConfigError

PAIR_BYTES = 8
"""Of two block ids, int32."""
_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class OrderKind(IntEnum):
    """What rank 0 has the others do."""

    RUN = 0
    """Operations of the program, over the step that comes with the order."""
    COPY_BLOCKS = 1
    """Of KV memory: int32 pairs, from and to."""
    SWAP_OUT = 2
    """Blocks to host memory; see `quintet.wire.step.StepPlan.swaps_out`."""
    SWAP_IN = 3
    """Blocks back from it."""
    EMBEDS = 4
    """Vectors of tokens are written over what the embedding made; see `vector_records`."""
    CHORE = 5
    """What a worker does while nobody waits."""
    MOVE_EXPERT = 6
    """A piece of an expert is copied from one rank to another; see `quintet.executor.distributed.parallel.expert_copies`."""
    CARRY_OUT = 8
    """Parts of blocks to where all ranks' come together: int32 pairs, of a block and a row; see
    `quintet.executor.distributed.parallel.kv_gather`."""
    CARRY_IN = 9
    """Parts of blocks back from there."""
    ON_DEVICE = 7
    """Of ranks on GPUs: part of what `quintet.executor.backends.cuda.rank_broadcast` says."""


class StepPart(IntEnum):
    """Where the parts of a step begin that stages are told to run: layers, then logits of some tokens."""

    LAYERS = 0
    LOGITS = 1
    END = 2


class Note(IntEnum):
    """What a rank says of itself; ``qt::Note``."""

    PROGRESS = 0
    """Work that it has done so far: standing still means hanging."""
    CHORES = 1
    """Whether it has chores left."""


class CRanksShape(ctypes.Structure):
    """Field by field ``qt::RanksShape``; its comments say what each is."""

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
    )


class COrder(ctypes.Structure):
    """Field by field ``qt::Order``; its comments say what each is."""

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
    """Field by field ``qt::Left``; its comments say what each is."""

    _fields_ = (
        ("offset", _SIZE),
        ("row_bytes", _SIZE),
        ("stride", _SIZE),
        ("rows", _SIZE),
        ("for_first", _SIZE),
    )


class RanksLibrary:
    """The functions, with their C types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layout(library, "qt_ranks_shape_bytes", ctypes.sizeof(CRanksShape))
        check_layout(library, "qt_ranks_order_bytes", ctypes.sizeof(COrder))
        check_layout(library, "qt_ranks_left_bytes", ctypes.sizeof(CLeft))
        a, n, i = _ADDRESS, _SIZE, _INT
        self.num_bytes = declare(library, "qt_ranks_bytes", a, result=n)
        self.new = declare(library, "qt_ranks_new", a, a, n, i, result=a)
        self.tell = declare(library, "qt_ranks_tell", a, a, a)
        self.hear = declare(library, "qt_ranks_hear", a, a, a)
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
        self.wait_for_told = declare(library, "qt_ranks_wait_for_told", a, n)
        self.note = declare(library, "qt_ranks_note", a, n, ctypes.c_uint64)
        self.noted = declare(library, "qt_ranks_noted", a, n, result=ctypes.c_uint64)
        self.payload = declare(library, "qt_ranks_payload", a, result=a)
        self.meet_now = declare(library, "qt_ranks_meet", a)
        self.wait_for_met = declare(library, "qt_ranks_wait_for_met", a, n, n, n)
        self.met = declare(library, "qt_ranks_met", a, n)
        self.left = declare(library, "qt_ranks_left", a, n, a)
        self.staging = declare(library, "qt_ranks_staging", a, result=a)
        self.kv = declare(library, "qt_ranks_kv", a, n, result=a)
        self.queries = declare(library, "qt_ranks_queries", a, n, n, result=a)
        self.mail = declare(library, "qt_ranks_mail", a, result=a)
        self.mail_ints = int(declare(library, "qt_ranks_mail_ints", result=n)())
        self.sums = declare(library, "qt_ranks_sums", a, n, n, result=a)
        self.gathered = declare(library, "qt_ranks_gathered", a, n, n, result=a)
        self.linear_sums = declare(library, "qt_program_linear_sums", a, a, a, n, n, i, a, n, i)
        self.experts_sums = declare(library, "qt_program_experts_sums", a, a, a, n, a, n, n, a, n, i)
        self.experts = declare(library, "qt_program_experts_of_ranks", a, a, a, a, n, a, n, n, a, a, n, i)
        self.meet = declare(library, "qt_program_meet", a, a, i, a, n, n, i)
        self.attention = declare(library, "qt_program_context_attention", a, a, a, a, n, a, a, n, n)
        self.add_sums = declare(library, "qt_program_add_sums", a, a, n, n, a, a, a, n, i)


def open_ranks_library() -> RanksLibrary:
    """Return it. Raises `ConfigError` where it was not built."""
    library = open_library()
    if library is None:
        raise ConfigError(
            "--tensor-parallel-size and --pipeline-parallel-size need Quintet's host kernels, and they were not built:"
            " install a C++ compiler (g++ or clang++) and Quintet again, or drop the flags"
        )
    return RanksLibrary(library)


class RanksMemory:
    """The memory that ranks share, as this process sees it."""

    def __init__(self, library: RanksLibrary, descriptor: int, shape: CRanksShape) -> None:
        """descriptor: of the memory, which is made as large as ``shape`` says; what it holds begins with zeros."""
        num_bytes = int(library.num_bytes(ctypes.byref(shape)))
        os.ftruncate(descriptor, num_bytes)
        self.mapped = mmap.mmap(descriptor, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))
