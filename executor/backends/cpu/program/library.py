"""Bindings of the compiled step: programs, and the functions that append operations to them.

``csrc/cpu`` documents the arguments. The bindings check nothing: only
`quintet.executor.backends.cpu.program.graph_builder` calls them, with its own values.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

from quintet.executor.backends.cpu.ops.host_library import check_layout, declare, open_library
from quintet.executor.sampling.settings import RECORD

_ADDRESS, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_Y = (_ADDRESS, _SIZE, _INT)  # address, stride and format

STATE_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "causal_conv": (_ADDRESS, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _INT, *_Y),
    "selective_scan": (_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, *_Y),
    "head_scan": (
        *(_ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _ADDRESS, _FLOAT, _FLOAT),
        *_Y,
    ),
    "delta_rule": (_ADDRESS, _SIZE, _SIZE, _SIZE, _SIZE, _ADDRESS, _ADDRESS, *_Y),
}
"""Arguments of each operation with a recurrent state, after the rows (or a layer's memory) and the offset of its states."""


class ProgramLibrary:
    """Program functions of the kernel library, with their C types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layout(library, "qt_draw_settings_bytes", RECORD.itemsize)
        self.check_layout = partial(check_layout, library)
        a, n, i, f = _ADDRESS, _SIZE, _INT, _FLOAT
        self.new = declare(library, "qt_program_new", result=a)
        self.delete = declare(library, "qt_program_delete", a)
        self.size = declare(library, "qt_program_size", a, result=n)
        self.pieces_done = declare(library, "qt_pieces_done", result=ctypes.c_uint64)
        self.mark = declare(library, "qt_program_mark", a)
        self.fill_step = declare(library, "qt_fill_step", a, a, a, a, a, n, result=n)
        self.run = declare(library, "qt_program_run", a, a, n, n)
        self.balance = declare(library, "qt_program_balance", a, a, n, n, n, a)
        self.embedding = declare(library, "qt_program_embedding", a, a, n, a, n, i, i)
        self.embedding_packed = declare(library, "qt_program_embedding_packed", a, a, a, n, i)
        self.rms_norm = declare(library, "qt_program_rms_norm", a, a, n, n, n, a, i, f, f, i, a, n, i, i)
        self.layer_norm = declare(library, "qt_program_layer_norm", a, a, n, n, n, a, a, i, f, a, n, i, i)
        self.add = declare(library, "qt_program_add", a, a, n, a, n, n, a, n, i, i)
        self.add_positions = declare(library, "qt_program_add_positions", a, a, n, a, n, n, a, n, i)
        self.multiply = declare(library, "qt_program_multiply", a, a, n, a, n, n, n, a, n, i, i)
        self.scale, self.clip, self.softcap = (
            declare(library, f"qt_program_{name}", a, a, n, n, f, a, n, i, i)
            for name in ("scale", "clip", "softcap")
        )
        self.xielu = declare(library, "qt_program_xielu", a, a, n, n, a, a, n, i, i)
        self.activation = declare(library, "qt_program_activation", a, i, a, n, n, a, n, i, i)
        self.take_outputs = declare(library, "qt_program_take_outputs", a, a, n, n, a, n, i)
        self.take_columns = declare(library, "qt_program_take_columns", a, a, n, n, a, a, n, i, i)
        self.linear = declare(library, "qt_program_linear", a, a, a, n, n, i, a, a, a, n, i, i, i, i)
        self.rope_kv_write = declare(library, "qt_program_rope_kv_write", a, a, a, n, a, n, a, n, a, a, n)
        self.experts = declare(library, "qt_program_experts", a, a, a, n, a, n, n, a, n, i)
        self.head_linear = declare(library, "qt_program_head_linear", a, a, n, a, n, n, i, a, n)
        self.lora = declare(library, "qt_program_lora", a, a, a, n, a, n, n, i, a, n)
        self.draw = declare(library, "qt_program_draw", a, a, n, i, n)
        self.kv_block_bytes = declare(library, "qt_kv_block_bytes", i, n, n, n, n, n, result=n)
        self.attention = declare(library, "qt_program_attention", a, a, a, n, a, a, n, n)

        self.causal_conv, self.selective_scan, self.head_scan, self.delta_rule = (
            declare(library, f"qt_program_{name}", a, a, n, *arguments)
            for name, arguments in STATE_ARGUMENTS.items()
        )


def program_library() -> ProgramLibrary | None:
    """Return the bindings, or None if the kernels are not built."""
    library = open_library()
    return None if library is None else ProgramLibrary(library)
