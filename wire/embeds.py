"""Prompt embeddings: vectors instead of rows of the model's embedding table, for spans of a prompt.

Numbers remain bytes as received, in the order ``[tokens, width]``, little-endian; there are no tensors here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec

from quintet.wire.model_files import ITEM_BYTES

FLOAT_BYTES: Mapping[str, int] = {name: ITEM_BYTES[name] for name in ("F64", "F32", "F16", "BF16")}
"""Bytes of a number, by the allowed formats of embeddings."""

DIGEST_BYTES = sha256().digest_size

WIDEST_BYTES = max(FLOAT_BYTES.values())


class EmbedsSpan(msgspec.Struct, array_like=True, gc=False):
    """Embeddings of consecutive tokens of a prompt, one per token. The ids of these tokens are placeholders."""

    start: int
    """Position of the first token."""
    dtype: str
    width: int
    values: bytes
    digest: bytes = b""
    """See `digest_of`; set by the tokenizer, so that other processes need not read the embeddings."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding."""
        return self.width * FLOAT_BYTES[self.dtype]

    @property
    def num_tokens(self) -> int:
        return len(self.values) // self.row_bytes

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    @property
    def is_whole(self) -> bool:
        """True when the bytes are a positive number of complete embeddings in a known format."""
        return (
            self.dtype in FLOAT_BYTES
            and self.width > 0
            and bool(self.values)
            and not len(self.values) % self.row_bytes
        )

    def piece(self, begin: int, end: int) -> EmbedsSpan:
        """Return the embeddings of the positions ``[begin, end)``, which are in the span, without a digest."""
        size = self.row_bytes
        values = self.values[(begin - self.start) * size : (end - self.start) * size]
        return EmbedsSpan(begin, self.dtype, self.width, values)


class EmbedsPrompt(msgspec.Struct, array_like=True, tag="embeds"):
    """A prompt as embeddings only, one per token."""

    dtype: str
    width: int
    values: bytes

    @property
    def span(self) -> EmbedsSpan:
        """The prompt as a span from position 0."""
        return EmbedsSpan(0, self.dtype, self.width, self.values)


class RowEmbeds(msgspec.Struct, array_like=True, gc=False):
    """Inside `StepPlan`: embeddings that the step computes for a slot's request, instead of its token ids."""

    slot: int
    span: EmbedsSpan


def are_ordered(spans: Sequence[EmbedsSpan], width: int, num_tokens: int, *, is_penalized: bool) -> bool:
    """Return True when a model of this width can compute the spans of a prompt: in order, disjoint, with digests.

    is_penalized: the request has a repetition penalty, which knows the placeholder ids of `num_leading` only.
    """
    end = 0
    for span in spans:
        is_known = span.is_whole and span.width == width and len(span.digest) == DIGEST_BYTES
        if not is_known or not end <= span.start < span.end <= num_tokens or (is_penalized and span.start):
            return False
        end = span.end
    return True


def num_leading(spans: Sequence[EmbedsSpan]) -> int:
    """Return the number of tokens given as embeddings from position 0 on. ``spans`` is not empty."""
    return spans[0].end if spans[0].start == 0 else 0


def digest_of(span: EmbedsSpan) -> bytes:
    """Return the SHA-256 of format, width and bytes. Releases the GIL."""
    digest = sha256(f"{span.dtype}, {span.width}\0".encode())
    digest.update(span.values)
    return digest.digest()


def first_not_finite(span: EmbedsSpan) -> int | None:
    """Return the index of the first NaN or infinite number, or None.

    Such a number has an exponent of all ones, visible in its two highest bytes. These bytes are compared as long
    integers at once; a gigabyte takes a second or two.
    """
    size = FLOAT_BYTES[span.dtype]
    high = span.values[size - 1 :: size].translate(_ONES_HIGH[span.dtype])
    low = span.values[size - 2 :: size].translate(_ONES_LOW[span.dtype])
    both = int.from_bytes(high, "little") & int.from_bytes(low, "little")
    if not both:
        return None
    return ((both & -both).bit_length() - 1) // 8


def _table(mask: int) -> bytes:
    return bytes(1 if byte & mask == mask else 0 for byte in range(256))


_ONES_HIGH = {"F64": _table(0x7F), "F32": _table(0x7F), "BF16": _table(0x7F), "F16": _table(0x7C)}
_ONES_LOW = {"F64": _table(0xF0), "F32": _table(0x80), "BF16": _table(0x80), "F16": _table(0)}
"""Byte -> 1 where its part of an exponent is all ones: the byte with the sign, and the one below it."""
