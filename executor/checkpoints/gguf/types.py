"""GGML number formats: values and bytes of a block. Imports no torch.

Format: structs of ggml-common.h and the enumeration of ggml.h in ggml-org/llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A number format."""

    name: str
    block: int
    """Values of a block; rows are whole blocks."""
    block_bytes: int
    packed_bytes: int | None = None
    """Bytes of a block in the host's packed format; None: dequantized to the model's number format."""

    def num_bytes(self, count: int) -> int:
        """Return the size of ``count`` values, a multiple of the block."""
        return count // self.block * self.block_bytes

    def num_packed_bytes(self, num_bytes: int, dtype_bytes: int) -> int:
        """Return the memory of ``num_bytes`` of a file, for a model number format of ``dtype_bytes``."""
        kept = self.block * dtype_bytes if self.packed_bytes is None else self.packed_bytes
        return num_bytes // self.block_bytes * kept


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18, 18),
    3: GgmlType("Q4_1", 32, 20, 20),
    6: GgmlType("Q5_0", 32, 22, 22),
    7: GgmlType("Q5_1", 32, 24, 24),
    8: GgmlType("Q8_0", 32, 34, 34),
    10: GgmlType("Q2_K", 256, 84, 84),
    11: GgmlType("Q3_K", 256, 110, 114),
    12: GgmlType("Q4_K", 256, 144, 148),
    13: GgmlType("Q5_K", 256, 176, 180),
    14: GgmlType("Q6_K", 256, 210, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136, 138),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17, 17),
}
"""Keyed by the type number in files: supported types of weights."""

BY_NAME = {each.name: each for each in TYPES.values()}

UNREAD = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
}
"""Known unsupported types: withdrawn, for activations, or without a served model."""
