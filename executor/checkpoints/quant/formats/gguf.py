"""GGUF: the file's header gives the type of each tensor; see `quintet.executor.checkpoints.gguf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quintet.executor.checkpoints.gguf.types import BY_NAME
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.hf_config import HfConfig


def of(types: Sequence[str]) -> Format:
    """Return the format of a file with these types; `quintet.executor.checkpoints.quant.gguf` makes the layers."""
    words = f"gguf: {', '.join(types)}"
    return Format("gguf", words, "", lambda layer: None, memory_bytes=_memory_bytes, takes_quantization=True)


def _memory_bytes(contents: Mapping[str, Entry], dtype_bytes: int) -> int:
    return sum(
        BY_NAME[entry.dtype].num_packed_bytes(entry.num_bytes, dtype_bytes) for entry in contents.values()
    )


def recognise(hf_config: HfConfig, section: HfConfig) -> Format:
    """Return the format of a config that was made from a GGUF file."""
    types = section.values.get("types")
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        raise section.wrong("types", "the types of the file's tensors: serve the .gguf file itself")
    return of(types)
