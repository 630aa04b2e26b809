"""Decode torchao's tensors to rows; see `quintet.executor.checkpoints.quant.formats.torchao`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quintet.executor.checkpoints.quant.decode import Coded, unpacked
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.wire.errors import ConfigError

MIDDLE = 8


def decode_int4(
    scheme: Scheme, tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int
) -> Coded:
    """See `quintet.executor.checkpoints.quant.decode.Decoder`."""
    assert scheme.codes is not None
    packed, scales, added = (tensors[each.ending] for each in scheme.stored[:3])
    codes = unpacked(scheme.codes, packed, range(begin, end), depth) ^ MIDDLE  # signed 4-bit codes
    scales, added = (each[:, begin:end].t().float() for each in (scales, added))
    if bool(((scales == 0) & (added != 0)).any()):
        raise ConfigError("a scale is 0 but its zero point is not: quantize the model again")
    zeros = MIDDLE - torch.where(scales == 0, 0.0, added / scales)
    return Coded(codes, scales.contiguous(), zeros.contiguous(), 0, scheme.group)
