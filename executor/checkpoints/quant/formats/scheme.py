"""Description of one quantized linear layer: its checkpoint tensors and the meaning of their bits. Imports no torch.

A weight is ``[rows, depth]`` (rows are outputs) of values ``(code - zero) * scale``;
`quintet.executor.checkpoints.quant.decode` computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn, Protocol

from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.names import spellings
from quintet.wire.config import Quantization
from quintet.wire.errors import ConfigError

FLOATS = ("F16", "BF16", "F32")
"""Number formats of scales."""
MOST_GROUP = 1 << 20
"""Largest accepted group size."""

_SMALL = {"F16": (0x10, 0x1F), "F32": (0x3C, 0x3D)}
"""Byte ranges that give values of some thousandths in either format."""


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 e2m1 codes: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats specification,
2023)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint tensor of a layer."""

    ending: str
    """Suffix of the name, after the layer's name and a dot."""
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    """Allowed number formats, as in safetensors headers."""
    dummies: tuple[int, int] | None = None
    """Range of its bytes in dummy weights; None: small values of its first kind, or any bits of an integer."""

    @property
    def dummy_bytes(self) -> tuple[int, int]:
        """Range of its bytes in dummy weights."""
        return self.dummies or _SMALL.get(self.kinds[0], (0, 255))


@dataclass(frozen=True, slots=True)
class Packing:
    """Bit layout of codes: words of codes that are adjacent along the depth or along the rows.

    ``[rows, depth]`` unless ``transposed``; the packed dimension is divided by the number of codes in a word. The
    codes of a tensor are one stream of bits, the first code in the lowest bits.
    """

    bits: int
    packed_along: str = "depth"
    """Packed dimension: ``depth`` or ``rows``."""
    transposed: bool = False
    evens_first: bool = False
    """True: a word of eight codes has codes 0, 2, 4, 6 before codes 1, 3, 5, 7."""
    word_bits: int = 32
    """Bits of one element of the tensor."""
    is_signed: bool = False
    """True: codes are two's-complement integers; the code 0 means 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Coding of one layer. `stored` begins with the codes; scales follow, then zero points if there are any."""

    stored: tuple[Stored, ...]
    codes: Packing | None = None
    """None: the first tensor ``[rows, depth]`` holds 8-bit values: floats or signed integers."""
    scale_transposed: bool = False
    """True: scales are ``[groups, rows]``."""
    scale_factor: float = 1.0
    """Constant factor of every scale."""
    global_scale: str | None = None
    """Suffix of a one-element tensor that multiplies every scale, or divides it if `divides`."""
    divides: bool = False
    weight_kind: str = ""
    """Number format of 8-bit float weights."""
    scale_kind: str | None = None
    """Number format of the scales; None: unknown."""
    group: int
    """Group size: adjacent inputs that share a scale; 0: the whole row."""
    row_group: int = 1
    """Adjacent rows that share their scales; 0: all rows."""
    zeros: Packing | None = None
    """Packing of the zero points; None: every zero point is the middle of the code range."""
    has_int8_zeros: bool = False
    """True: the third tensor has a signed zero point for each scale."""
    real_zeros: bool = False
    """True: zero points are floating point; the format's decoder reads them."""
    zero_offset: int = 0
    """Constant that is added to a stored zero point."""
    all_zeros: int | None = None
    """Required value of all zero points of a symmetric format: they are checked, not kept."""
    order: str | None = None
    """Suffix of a tensor ``[depth]`` with the group of each input; None: groups are contiguous."""
    input_factors: str | None = None
    """Suffix of a tensor ``[depth]`` that multiplies the inputs first; it is the last of `stored`."""
    int8_activations: bool = False
    """True: inputs are quantized to 8 bits too, one scale for each token."""
    fp8_activations: bool = False
    """True: the format intends inputs in fp8."""
    is_fp4: bool = False
    """True: codes are those of `E2M1`."""
    row_tables: bool = False
    """True: codes index a table for each row."""
    outliers: int = 0
    """Maximum number of outliers that are added to table values."""
    table: str = ""
    """``nf4`` or ``fp4``: bitsandbytes' table of the codes; empty: no table."""
    decoder: str = "quintet.executor.checkpoints.quant.decode:decode"
    """Function that decodes the tensors to rows: see `quintet.executor.checkpoints.quant.decode.Decoder`."""

    @property
    def bits(self) -> int | None:
        """Bits of an integer code; None if values are not integers times a scale."""
        if self.codes is not None:
            return None if self.is_fp4 or self.row_tables else self.codes.bits
        return 8 if not self.table and "I8" in self.stored[0].kinds else None


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A linear layer of a model, as input of `Format.scheme`."""

    name: str
    """The model's name of its tensors, without the suffix."""
    rows: int
    depth: int
    is_output_layer: bool
    contents: Mapping[str, Entry] | None
    """Checkpoint tensors; None: no checkpoint (dummy weights)."""
    prefix: str = ""
    """See `quintet.executor.checkpoints.weights.plan.WeightPlan`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that checkpoints may use."""
        return spellings(self.name, self.prefix)

    def entry(self, ending: str) -> Entry | None:
        """Return the checkpoint tensor with a suffix; None if it is missing or there is no checkpoint."""
        if self.contents is None:
            return None
        return next(
            (self.contents[f"{name}.{ending}"] for name in self.names if f"{name}.{ending}" in self.contents),
            None,
        )

    @property
    def is_dummy_head(self) -> bool:
        """True for the output layer of dummy weights, which most formats leave unquantized."""
        return self.contents is None and self.is_output_layer

    def kind(self, ending: str) -> str | None:
        """Return the number format of a tensor; None if it is unknown."""
        entry = self.entry(ending)
        return None if entry is None else entry.dtype

    def is_plain(self, mark: str, *, is_left_out: bool = False) -> bool:
        """Return True if the layer is unquantized: the checkpoint has its weight and no ``mark``.

        is_left_out: whether the configuration leaves it out, which counts if the tensors do not show another format.
        """
        if self.entry(mark) is None:
            return is_left_out or self.entry("weight") is not None
        return is_left_out and self.kind("weight") in FLOATS

    def shaped(self, ending: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the allowed shape that the checkpoint's tensor has; the first one if it has none of them."""
        entry = self.entry(ending)
        return entry.shape if entry is not None and entry.shape in shapes else shapes[0]

    def refuse(self, why: str) -> NoReturn:
        """Raise the error of a layer that does not fit its format."""
        raise ConfigError(f"layer {self.name!r} [{self.rows}, {self.depth}]: {why}")


def with_input_factors(scheme: Scheme, layer: StoredLayer, factors: str, *shapes: tuple[int, ...]) -> Scheme:
    """Return the scheme with the `Scheme.input_factors` of this suffix, of one of ``shapes``, if the layer has some."""
    if layer.entry(factors) is None:
        return scheme
    stored = Stored(factors, layer.shaped(factors, *shapes), FLOATS)
    return replace(scheme, stored=(*scheme.stored, stored), input_factors=factors, int8_activations=False)


def stored_bytes(contents: Mapping[str, Entry], dtype_bytes: int) -> int:
    """Return the size of the checkpoint's tensors: `Format.memory_bytes` of a format that stays as it is stored."""
    return sum(entry.num_bytes for entry in contents.values())


@dataclass(frozen=True, slots=True)
class Format:
    """A recognised checkpoint format."""

    name: Quantization
    """Name for ``--quantization``."""
    words: str
    """Description of the configuration for messages: ``gptq: 4 bits in groups of 128``."""
    mark: str
    """Part of one tensor name that every quantized layer has."""
    scheme: Callable[[StoredLayer], Scheme | None]
    """Returns the coding of a layer; None if it is unquantized. Raises `ConfigError` for a layer that cannot be read."""
    ignored: tuple[str, ...] = ()
    """Name patterns of unneeded tensors; see `quintet.executor.checkpoints.weights.plan.WeightPlan.ignored`."""
    memory_bytes: Callable[[Mapping[str, Entry], int], int] = stored_bytes
    """Returns an estimate of the loaded weights' memory in bytes, for a size in bytes of the model's number format."""
    takes_quantization: bool = False
    """True if a ``--quantization`` may round the stored weights further."""


class LayerScheme(Protocol):
    """Configuration of layers that are quantized alike."""

    @property
    def words(self) -> str:
        """Description for messages."""


def in_words(name: str, kinds: Iterable[LayerScheme | None]) -> str:
    """Return `Format.words` of a format with several kinds of layers."""
    return f"{name}: {'; '.join(dict.fromkeys(each.words for each in kinds if each is not None))}"


def groups_in_words(group: int, alone: str = "one group a row") -> str:
    """Return a description of the group size; ``alone`` for 0."""
    return f"groups of {group}" if group else alone


def total_bytes(
    contents: Mapping[str, Entry], growth: Mapping[str, float], singles: Collection[str] = ()
) -> int:
    """Return the tensors' size in memory.

    growth: ratio of memory to file size by suffix; singles: suffixes of tensors converted to fp32.
    """
    total = 0.0
    for name, entry in contents.items():
        ending = name.rpartition(".")[2]
        total += 4 * prod(entry.shape) if ending in singles else entry.num_bytes * growth.get(ending, 1.0)
    return int(total)
