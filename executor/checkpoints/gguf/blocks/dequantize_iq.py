"""Dequantize GGML's IQ1, IQ2 and IQ3 blocks: codes index rows of a table, signs are stored separately.

``grids.json`` has the formats' tables: for each row the indices into the table's values. Format: see
`quintet.executor.checkpoints.gguf.blocks.dequantize`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from quintet.executor.checkpoints.gguf.blocks.bits import bits_of, half_of

_DELTA = 0.125
"""Offset that IQ1 adds to or subtracts from its values."""


def iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize IQ2_XXS: for 32 values four table rows, 7-bit signs for each 8, a 4-bit scale."""
    words = _words(blocks[:, 2:], torch.int32).view(-1, 8, 2)
    scale = _quarters(half_of(blocks, 0), words[..., 1] >> 28 & 15)
    rows = words[..., 0].contiguous().view(torch.uint8).view(-1, 8, 4)
    return _signed_rows("IQ2_XXS", scale, rows, _signs_of_seven(words[..., 1]))


def iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize IQ2_XS: for 8 values a 9-bit row and 7-bit signs; a 4-bit scale for each 16."""
    codes = _words(blocks[:, 2:66], torch.int16).int() & 0xFFFF
    scale = _quarters(half_of(blocks, 0), bits_of(blocks[:, 66:], 1, 4))
    return _signed_rows("IQ2_XS", scale, codes.view(-1, 16, 2) & 511, _spread(codes >> 9).view(-1, 16, 2, 8))


def iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize IQ2_S: for 8 values a 10-bit row and one sign each; a 4-bit scale for each 16."""
    scale = _quarters(half_of(blocks, 0), bits_of(blocks[:, 74:], 1, 4))
    rows = blocks[:, 2:34].int() | bits_of(blocks[:, 66:74], 1, 2).int() << 8
    return _signed_rows("IQ2_S", scale, rows.view(-1, 16, 2), _signs(blocks[:, 34:66]).view(-1, 16, 2, 8))


def iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize IQ3_XXS: for 4 values a row; 7-bit signs for each 8, a 4-bit scale for each 32."""
    words = _words(blocks[:, 66:], torch.int32)
    scale = half_of(blocks, 0) * (0.5 + (words >> 28 & 15).float()) * 0.5
    return _signed_rows(
        "IQ3_XXS", scale, blocks[:, 2:66].view(-1, 8, 8), _signs_of_seven(words).view(-1, 8, 8, 4)
    )


def iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize IQ3_S: for 4 values a 9-bit row and one sign each; a 4-bit scale for each 32."""
    scale = half_of(blocks, 0) * (1 + 2 * bits_of(blocks[:, 106:], 1, 4).float())
    rows = blocks[:, 2:66].int() | bits_of(blocks[:, 66:74], 1, 1).int() << 8
    return _signed_rows("IQ3_S", scale, rows.view(-1, 8, 8), _signs(blocks[:, 74:106]).view(-1, 8, 8, 4))


def iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize IQ1_S: for 8 values an 11-bit row; for 32 a 3-bit scale and the sign of the offset."""
    high = _words(blocks[:, 34:], torch.int16).int() & 0xFFFF  # [num_blocks, 8]
    scale = half_of(blocks, 0) * (2 * (high >> 12 & 7) + 1).float()
    delta = torch.where((high & 0x8000) == 0, _DELTA, -_DELTA)
    upper = torch.stack([high >> shift & 7 for shift in (0, 3, 6, 9)], -1).flatten(1)
    rows = _grid("IQ1_S")[blocks[:, 2:34].int() | upper << 8].view(-1, 8, 32)
    return (scale[..., None] * (rows + delta[..., None])).flatten(1)


def iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize IQ1_M: as `iq1_s`, with an offset sign for each 8 and a scale for each 16; upper bits of the scales
    hold the block's scale."""
    scales = _words(blocks[:, 48:], torch.int16).int() & 0xFFFF  # [num_blocks, 4]
    whole = sum((scales[:, i] >> 12) << 4 * i for i in range(4))
    assert isinstance(whole, torch.Tensor)
    block_scale = whole.to(torch.int16).view(torch.float16).float()[:, None]
    each = torch.stack([scales >> shift & 7 for shift in (0, 3, 6, 9)], -1).flatten(1)
    scale = block_scale * (2 * each + 1).float()  # [num_blocks, 16]
    high = bits_of(blocks[:, 32:48], 1, 4).int()  # [num_blocks, 32]
    delta = torch.where((high & 8) == 0, _DELTA, -_DELTA)
    rows = _grid("IQ1_S")[blocks[:, :32].int() | (high & 7) << 8]  # [num_blocks, 32, 8]
    moved = (rows + delta[..., None]).view(-1, 16, 16)
    return (scale[..., None] * moved).flatten(1)


def _signed_rows(name: str, scale: torch.Tensor, rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return scaled values. scale: ``[num_blocks, groups]``; rows: ``[num_blocks, groups, rows]``; signs: one for each
    value."""
    return (scale[..., None, None] * _grid(name)[rows.int()] * signs).flatten(1)


def _quarters(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return scale * (0.5 + codes.float()) * 0.25


def _words(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return raw.contiguous().view(dtype)


def _signs(raw: torch.Tensor) -> torch.Tensor:
    """Return 1 or -1 for each bit of bytes."""
    return 1.0 - 2.0 * bits_of(raw, 1, 1).float()


def _signs_of_seven(words: torch.Tensor) -> torch.Tensor:
    """Return the signs of 32 values for each word ``[..., groups]``: four times 7 bits."""
    return torch.stack([_spread(words >> shift & 127) for shift in (0, 7, 14, 21)], -2)


def _spread(codes: torch.Tensor) -> torch.Tensor:
    """Expand 7 bits to 8 signs; the number of negative ones is even."""
    bits = codes[..., None] >> torch.arange(7) & 1
    last = bits.sum(-1, keepdim=True) & 1
    return 1.0 - 2.0 * torch.cat([bits, last], -1).float()


@cache
def _grid(name: str) -> torch.Tensor:
    """Return a table ``[rows, values]``."""
    table = json.loads((Path(__file__).parent / "grids.json").read_text())[name]
    values = torch.tensor(table["values"], dtype=torch.float32)
    return values[torch.tensor([int(digit) for digit in table["rows"]])].view(-1, table["numbers_a_row"])
