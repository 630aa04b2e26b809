"""Embeddings prompts: vectors instead of rows of the model's embedding table.

Numbers remain bytes as received, in the order ``[tokens, width]``, little-endian; there are no tensors here.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import msgspec

from quintet.wire.model_files import ITEM_BYTES

FLOAT_BYTES: Mapping[str, int] = {name: ITEM_BYTES[name] for name in ("F64", "F32", "F16", "BF16")}
"""Bytes of a number, by the allowed formats of embeddings."""

DIGEST_BYTES = sha256().digest_size

WIDEST_BYTES = max(FLOAT_BYTES.values())


class EmbedsPrompt(msgspec.Struct, array_like=True, tag="embeds"):
    """A prompt as embeddings, one per token."""

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
        """Number of embeddings."""
        return len(self.values) // self.row_bytes

    @property
    def is_whole(self) -> bool:
        """True when the bytes are a positive number of complete embeddings in a known format."""
        return (
            self.dtype in FLOAT_BYTES
            and self.width > 0
            and bool(self.values)
            and not len(self.values) % self.row_bytes
        )

    def fits(self, width: int, num_tokens: int) -> bool:
        """Return True when a model of this width can compute it for this number of tokens."""
        return (
            self.is_whole
            and (self.width, self.num_tokens) == (width, num_tokens)
            and len(self.digest) == DIGEST_BYTES
        )


class RowEmbeds(msgspec.Struct, array_like=True, gc=False):
    """Inside `StepPlan`: embeddings of consecutive positions of a slot's request, computed by the step."""

    slot: int
    start: int
    """Position of the first."""
    dtype: str
    width: int
    values: bytes

    @property
    def is_whole(self) -> bool:
        """See `EmbedsPrompt.is_whole`."""
        return EmbedsPrompt(self.dtype, self.width, self.values).is_whole

    @property
    def num_tokens(self) -> int:
        """Number of embeddings."""
        return len(self.values) // (self.width * FLOAT_BYTES[self.dtype])


def digest_of(prompt: EmbedsPrompt) -> bytes:
    """Return the SHA-256 of format, width and bytes. Releases the GIL."""
    digest = sha256(f"{prompt.dtype}, {prompt.width}\0".encode())
    digest.update(prompt.values)
    return digest.digest()


def first_not_finite(prompt: EmbedsPrompt) -> int | None:
    """Return the index of the first NaN or infinite number, or None.

    Such a number has an exponent of all ones, visible in its two highest bytes. These bytes are compared as long
    integers at once; a gigabyte takes a second or two.
    """
    size = FLOAT_BYTES[prompt.dtype]
    high = prompt.values[size - 1 :: size].translate(_ONES_HIGH[prompt.dtype])
    low = prompt.values[size - 2 :: size].translate(_ONES_LOW[prompt.dtype])
    both = int.from_bytes(high, "little") & int.from_bytes(low, "little")
    if not both:
        return None
    return ((both & -both).bit_length() - 1) // 8


def _table(mask: int) -> bytes:
    return bytes(1 if byte & mask == mask else 0 for byte in range(256))


_ONES_HIGH = {"F64": _table(0x7F), "F32": _table(0x7F), "BF16": _table(0x7F), "F16": _table(0x7C)}
_ONES_LOW = {"F64": _table(0xF0), "F32": _table(0x80), "BF16": _table(0x80), "F16": _table(0)}
"""Byte -> 1 where its part of an exponent is all ones: the byte with the sign, and the one below it."""
