"""What a format says of one linear layer: which tensors a checkpoint has of it, and what their bits mean. Imports no torch.

A weight is ``[rows, depth]`` (rows are outputs) of numbers ``(code - zero) * scale``;
`quintet.executor.checkpoints.quant.decode` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn, Protocol

from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.card import ModelCard
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError

FLOATS = ("F16", "BF16", "F32")
"""Number formats that scales may have."""

_SMALL = {"F16": (0x10, 0x1F), "F32": (0x3C, 0x3D)}
"""Bytes that make some thousandths in either format."""


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What 4 bits mean: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats specification, 2023)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a layer, as a checkpoint has it."""

    ending: str
    """Behind the layer's name and a dot."""
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    """Number formats that it may have, as the headers of files name them."""
    dummies: tuple[int, int] | None = None
    """Between what its bytes lie in dummy weights; None: small numbers of its first kind, or any bits of an integer."""

    @property
    def dummy_bytes(self) -> tuple[int, int]:
        """Between what its bytes lie in dummy weights."""
        return self.dummies or _SMALL.get(self.kinds[0], (0, 255))


@dataclass(frozen=True, slots=True)
class Packing:
    """How a tensor holds codes of a few bits: words of them that are neighbours in the depth, or in the rows.

    ``[rows, depth]`` unless ``transposed``; the dimension of neighbours is shorter by the number of codes in a word. Codes of
    one tensor are one stream of bits, the first in the lowest.
    """

    bits: int
    neighbours: str = "depth"
    """``depth`` or ``rows``."""
    transposed: bool = False
    evens_first: bool = False
    """Whether a word of eight codes has the first, third, fifth and seventh before the others."""
    word_bits: int = 32
    """Of the tensor's numbers."""
    is_signed: bool = False
    """Whether codes are integers of both signs: zero, not the middle of their range, is what all their bits 0 mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One layer. `stored` begins with the codes; scales follow, and zeros where there are any."""

    stored: tuple[Stored, ...]
    codes: Packing | None = None
    """None: the first tensor ``[rows, depth]`` holds numbers of 8 bits that mean themselves: floats, or signed integers."""
    scale_transposed: bool = False
    """Whether scales are ``[groups, rows]``."""
    scale_factor: float = 1.0
    """What every scale is multiplied by."""
    global_scale: str | None = None
    """Ending of a tensor of one number, by which every scale is multiplied; or divided, if `divides`."""
    divides: bool = False
    weight_kind: str = ""
    """Number format of weights that are floats of 8 bits."""
    scale_kind: str | None = None
    """Number format of the scales, where it is known."""
    group: int
    """Neighbouring inputs that share a scale; 0: all of a row."""
    row_group: int = 1
    """Neighbouring rows that share their scales; 0: all."""
    zeros: Packing | None = None
    """How zeros are held; None: the zero of every code is the middle of its range."""
    has_int8_zeros: bool = False
    """Whether the third tensor has a signed zero for each scale."""
    real_zeros: bool = False
    """Whether zeros are floating-point numbers, which the decoder knows how to read."""
    zero_offset: int = 0
    """What is added to a stored zero."""
    all_zeros: int | None = None
    """What every zero must be where the format says that it is symmetric: zeros are read and checked, not kept."""
    order: str | None = None
    """Ending of a tensor ``[depth]`` that says of each input which group it is of; None: groups are of neighbours."""
    input_factors: str | None = None
    """Ending of a tensor ``[depth]`` by which inputs are multiplied before; it is the last of `stored`."""
    int8_activations: bool = False
    """Whether inputs are quantized to 8 bits too, each token by its own scale."""
    fp8_activations: bool = False
    """Whether inputs are meant to be rounded to fp8."""
    is_fp4: bool = False
    """Whether codes are those of `E2M1`."""
    row_tables: bool = False
    """Whether codes stand for numbers that differ from row to row."""
    outliers: int = 0
    """How many numbers, at most, are added to those of such tables."""
    table: str = ""
    """``nf4`` or ``fp4``: which of bitsandbytes' numbers codes stand for."""
    decoder: str = "quintet.executor.checkpoints.quant.decode:decode"
    """Function that makes rows of the tensors: see `quintet.executor.checkpoints.quant.decode.Decoder`."""

    @property
    def bits(self) -> int | None:
        """Of a code that is an integer; None where numbers are no integers times a scale."""
        if self.codes is not None:
            return None if self.is_fp4 or self.row_tables else self.codes.bits
        return 8 if not self.table and "I8" in self.stored[0].kinds else None


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A linear layer of a model, as a format is asked about it."""

    name: str
    """Of its tensors, without the last ending, as the model has it."""
    rows: int
    depth: int
    is_output_layer: bool
    contents: Mapping[str, Entry] | None
    """What the checkpoint holds; None where there is none (dummy weights)."""
    prefix: str = ""
    """See `quintet.executor.checkpoints.weights.plan.WeightPlan`."""

    @property
    def names(self) -> tuple[str, ...]:
        """What checkpoints may call it."""
        if not self.prefix:
            return (self.name,)
        return (self.name, self.name.removeprefix(self.prefix), self.prefix + self.name)

    def entry(self, ending: str) -> Entry | None:
        """Return what the checkpoint has under an ending; None where it has nothing, or is none."""
        if self.contents is None:
            return None
        return next(
            (self.contents[f"{name}.{ending}"] for name in self.names if f"{name}.{ending}" in self.contents),
            None,
        )

    def kind(self, ending: str) -> str | None:
        """Return the number format of a tensor; None where it is not known."""
        entry = self.entry(ending)
        return None if entry is None else entry.dtype

    def is_plain(self, mark: str) -> bool:
        """Whether the checkpoint has a weight of it, and no ``mark``: whoever quantized it left this layer out."""
        return self.entry("weight") is not None and self.entry(mark) is None

    def shaped(self, ending: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Return that of the allowed shapes which the checkpoint has; the first where it has none of them."""
        entry = self.entry(ending)
        return entry.shape if entry is not None and entry.shape in shapes else shapes[0]

    def refuse(self, why: str) -> NoReturn:
        """Raise the error of a layer that does not fit its format."""
        raise ConfigError(f"layer {self.name!r} [{self.rows}, {self.depth}]: {why}")


class Format(Protocol):
    """A checkpoint's, recognised."""

    @property
    def name(self) -> Quantization:
        """As ``--quantization`` may have it."""

    @property
    def words(self) -> str:
        """What the checkpoint's configuration says, for people: ``gptq: 4 bits in groups of 128``."""

    @property
    def mark(self) -> str:
        """What the name of one tensor of each quantized layer ends with."""

    @property
    def ignored(self) -> Sequence[str]:
        """Patterns of tensors' names that are not needed; see `quintet.executor.checkpoints.weights.plan.WeightPlan.ignored`."""

    @property
    def takes_quantization(self) -> bool:
        """Whether what it holds may be rounded into a ``--quantization`` besides."""

    def memory_bytes(self, contents: Mapping[str, Entry], dtype_bytes: int) -> int:
        """Return about what the weights take in memory once they are loaded; ``dtype_bytes``: of one of the model's numbers."""

    def scheme(self, layer: StoredLayer) -> Scheme | None:
        """Return how the checkpoint has a layer; None where it has it as it was. Raises `ConfigError` where it cannot be."""


class LayerScheme(Protocol):
    """What a configuration says of the layers that are quantized alike."""

    @property
    def words(self) -> str:
        """For people."""


def in_words(name: str, kinds: Iterable[LayerScheme | None]) -> str:
    """Return `Format.words` of a format whose layers have numbers of several kinds."""
    return f"{name}: {'; '.join(dict.fromkeys(each.words for each in kinds if each is not None))}"


def groups_in_words(group: int, alone: str = "one group a row") -> str:
    """Return what is said of groups; 0: ``alone``."""
    return f"groups of {group}" if group else alone


def total_bytes(
    contents: Mapping[str, Entry], growth: Mapping[str, float], singles: Collection[str] = ()
) -> int:
    """Return what tensors take; ``growth``: by ending, how much more than on the disk; ``singles``: those that become fp32."""
    total = 0.0
    for name, entry in contents.items():
        ending = name.rpartition(".")[2]
        total += 4 * prod(entry.shape) if ending in singles else entry.num_bytes * growth.get(ending, 1.0)
    return int(total)


Recognise = Callable[[ModelCard, ModelCard], Format]
"""From a card and the section of it that describes the format. Raises `ConfigError` for a variant that does not load."""
