"""Decode BitNet's tensors to rows; see `quintet.executor.checkpoints.quant.formats.bitnet`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quintet.executor.checkpoints.quant.decode import Coded
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.wire.errors import ConfigError

ZERO = 1


def decode(scheme: Scheme, tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int) -> Coded:
    """See `quintet.executor.checkpoints.quant.decode.Decoder`."""
    packed, scale = (tensors[each.ending] for each in scheme.stored)
    in_part, found = len(packed), []
    for part in range(begin // in_part, -(-end // in_part)):
        first, last = (max(0, min(in_part, each - part * in_part)) for each in (begin, end))
        found.append(packed[first:last] >> 2 * part & 3)
    codes = torch.cat(found)
    if bool((codes == 3).any()):
        raise ConfigError("the weight has the invalid code 3: download the checkpoint again")
    one = scale.float().reshape(1, 1)
    return Coded(codes, (1 / one if scheme.divides else one).expand(end - begin, 1), None, ZERO, 0)
