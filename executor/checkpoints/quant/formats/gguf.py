"""GGUF: the file's header gives the type of each tensor; see `quintet.executor.checkpoints.gguf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quintet.executor.checkpoints.gguf.types import BY_NAME
from quintet.executor.checkpoints.quant.formats.scheme import Format, Scheme, StoredLayer
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.card import ModelCard
from quintet.wire.config import Quantization


@dataclass(frozen=True, slots=True)
class Gguf:
    """A `Format`."""

    types: tuple[str, ...]
    name: Quantization = "gguf"
    mark: str = ""
    ignored: Sequence[str] = ()
    takes_quantization: bool = True

    @property
    def words(self) -> str:
        """See `Format`."""
        return f"gguf: {', '.join(self.types)}"

    def memory_bytes(self, contents: Mapping[str, Entry], dtype_bytes: int) -> int:
        """See `Format`."""
        return sum(
            BY_NAME[entry.dtype].num_packed_bytes(entry.num_bytes, dtype_bytes) for entry in contents.values()
        )

    def scheme(self, layer: StoredLayer) -> Scheme | None:
        """See `Format`. Returns None: `quintet.executor.checkpoints.quant.gguf` makes the layers."""
        return None


def recognise(card: ModelCard, section: ModelCard) -> Format:
    """Return the format of a card that was made from a GGUF file."""
    types = section.values.get("types")
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        raise section.wrong("types", "the types of the file's tensors: serve the .gguf file itself")
    return Gguf(tuple(types))
