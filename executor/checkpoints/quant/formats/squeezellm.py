"""SqueezeLLM (Kim et al., "SqueezeLLM: Dense-and-Sparse Quantization", 2023), as its authors' tool saves it:

    qweight       int32 [depth * bits / 32, rows]   codes of adjacent inputs in a word, as in GPTQ
    lookup_table  fp32  [rows, 8 or 16]             value of each code in a row

Outliers are added to these values, in compressed sparse rows and in whole dense rows:

    rows  int32 [rows + 1]          cols  int32 [count]         vals  fp32 [count]
    full_rows  fp32 [depth, n]      full_row_indices  int32 [n]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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

SPARSE = {"rows": "I32", "cols": "I32", "vals": "F32", "full_rows": "F32", "full_row_indices": "I32"}
"""Suffixes and number formats of a layer's outliers."""
BLOCK = 128
"""Inputs in one memory block of 4-bit codes; rows are whole blocks."""
TABLE_BYTES = 68
"""Bytes of an output's table in memory: 16 fp32 values and a scale."""


MARK = "lookup_table"


@dataclass(frozen=True, slots=True)
class SqueezeLlm:
    """Layers of one number of bits."""

    bits: int

    def memory_bytes(self, contents: Mapping[str, Entry], dtype_bytes: int) -> int:
        """See `Format`."""
        kept = dict.fromkeys((*SPARSE, "qweight", MARK), 0.0) | {"vals": 2.0, "full_rows": 2.0}
        total = total_bytes(contents, kept)
        for name, entry in contents.items():
            if name.endswith(".qweight") and len(entry.shape) == 2:
                words, rows = entry.shape
                stem = name.removesuffix("qweight")
                if ".experts." in name and (f"{stem}rows" in contents or f"{stem}full_rows" in contents):
                    # Experts with outliers are dequantized.
                    total += words * 32 // self.bits * rows * dtype_bytes
                    continue
                total += rows * (-(-words * 32 // (BLOCK * self.bits)) * BLOCK // 2 + TABLE_BYTES)
        return total

    def scheme(self, layer: StoredLayer) -> Scheme | None:
        """See `Format`."""
        if layer.is_output_layer or layer.is_plain(MARK):
            return None
        if layer.depth * self.bits % 32:
            layer.refuse(f"SqueezeLLM needs columns of {self.bits} bits that fill whole 32-bit words")
        sparse = {ending: layer.entry(ending) for ending in SPARSE}
        outliers = 0
        stored = [
            Stored("qweight", (layer.depth * self.bits // 32, layer.rows), ("I32",)),
            Stored(MARK, (layer.rows, 1 << self.bits), ("F32", "F16", "BF16")),
        ]
        for first, others in (("rows", ("cols", "vals")), ("full_rows", ("full_row_indices",))):
            entry, together = sparse[first], [sparse[each] for each in others]
            if entry is None:
                continue
            if None in together:
                layer.refuse(
                    f"the checkpoint has outliers in {first!r}, but the tensor {others[together.index(None)]!r} is missing"
                )
            count = together[-1].shape[:1] if together[-1] is not None else ()
            outliers += sum(count) if first == "rows" else layer.depth * sum(count)
            stored.append(
                Stored(
                    first, (layer.rows + 1,) if first == "rows" else (layer.depth, *count), (SPARSE[first],)
                )
            )
            stored += [Stored(each, count, (SPARSE[each],)) for each in others]
        return Scheme(
            stored=tuple(stored),
            codes=Packing(self.bits, "depth", transposed=True),
            group=0,
            row_tables=True,
            outliers=outliers,
            decoder="quintet.executor.checkpoints.quant.decode_formats:squeezellm",
        )


def recognise(hf_config: HfConfig, section: HfConfig) -> Format:
    """Return the format of a config's ``quantization_config``, or of ``quant_config.json``."""
    key = ("wbits", "bits")
    bits = section.whole(key, 1, 16)
    if bits not in (3, 4):
        raise section.wrong(key, "3 or 4")
    layers = SqueezeLlm(bits)
    words = f"squeezellm: {bits} bits, a table of {1 << bits} numbers for each row"
    return Format("squeezellm", words, MARK, layers.scheme, ("*.startrows",), layers.memory_bytes)
