"""SqueezeLLM (Kim et al., "SqueezeLLM: Dense-and-Sparse Quantization", 2023), as its authors' tool saves it:

    qweight       int32 [depth * bits / 32, rows]   codes of adjacent inputs in a word, as in GPTQ
    lookup_table  fp32  [rows, 8 or 16]             value of each code in a row

Outliers are added to these values, in compressed sparse rows and in whole dense rows:

    rows  int32 [rows + 1]          cols  int32 [count]         vals  fp32 [count]
    full_rows  fp32 [depth, n]      full_row_indices  int32 [n]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from quintet.executor.checkpoints.quant.formats.scheme import (
    Format,
    Packing,
    Scheme,
    Stored,
    StoredLayer,
    total_bytes,
)
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.hf_config import HfConfig

MARK = "lookup_table"
SPARSE = {"rows": "I32", "cols": "I32", "vals": "F32", "full_rows": "F32", "full_row_indices": "I32"}
"""Suffixes and number formats of a layer's outliers."""
BLOCK = 128
"""Inputs in one memory block of 4-bit codes; rows are whole blocks."""
TABLE_BYTES = 68
"""Bytes of an output's table in memory: 16 fp32 values and a scale."""


def _memory_bytes(bits: int, contents: Mapping[str, Entry], dtype_bytes: int) -> int:
    kept = dict.fromkeys((*SPARSE, "qweight", MARK), 0.0) | {"vals": 2.0, "full_rows": 2.0}
    total = total_bytes(contents, kept)
    for name, entry in contents.items():
        if name.endswith(".qweight") and len(entry.shape) == 2:
            words, rows = entry.shape
            stem = name.removesuffix("qweight")
            if ".experts." in name and (f"{stem}rows" in contents or f"{stem}full_rows" in contents):
                # Experts with outliers are dequantized.
                total += words * 32 // bits * rows * dtype_bytes
                continue
            total += rows * (-(-words * 32 // (BLOCK * bits)) * BLOCK // 2 + TABLE_BYTES)
    return total


def _scheme(bits: int, layer: StoredLayer) -> Scheme | None:
    rows, depth = layer.rows, layer.depth
    if layer.is_output_layer or layer.is_plain(MARK):
        return None
    if depth * bits % 32:
        layer.refuse(f"SqueezeLLM needs columns of {bits} bits that fill whole 32-bit words")
    outliers = 0
    stored = [
        Stored("qweight", (depth * bits // 32, rows), ("I32",)),
        Stored(MARK, (rows, 1 << bits), ("F32", "F16", "BF16")),
    ]
    for first, others in (("rows", ("cols", "vals")), ("full_rows", ("full_row_indices",))):
        if layer.entry(first) is None:
            continue
        for each in others:
            if layer.entry(each) is None:
                layer.refuse(f"the checkpoint has outliers in {first!r}, but the tensor {each!r} is missing")
        last = layer.entry(others[-1])
        count = () if last is None else last.shape[:1]
        outliers += sum(count) if first == "rows" else depth * sum(count)
        stored.append(Stored(first, (rows + 1,) if first == "rows" else (depth, *count), (SPARSE[first],)))
        stored += [Stored(each, count, (SPARSE[each],)) for each in others]
    return Scheme(
        stored=tuple(stored),
        codes=Packing(bits, "depth", transposed=True),
        group=0,
        row_tables=True,
        outliers=outliers,
        decoder="quintet.executor.checkpoints.quant.decode_formats:squeezellm",
    )


def recognise(section: HfConfig) -> Format:
    """Return the format of a config's ``quantization_config``, or of ``quant_config.json``."""
    key = ("wbits", "bits")
    bits = section.whole(key, 1, 16)
    if bits not in (3, 4):
        raise section.wrong(key, "3 or 4")
    words = f"squeezellm: {bits} bits, a table of {1 << bits} numbers for each row"
    scheme, memory_bytes = partial(_scheme, bits), partial(_memory_bytes, bits)
    return Format("squeezellm", words, MARK, scheme, ("*.startrows",), memory_bytes)
