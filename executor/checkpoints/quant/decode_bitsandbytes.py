"""Decode bitsandbytes' tensors of 4-bit codes to rows; see `quintet.executor.checkpoints.quant.formats.bitsandbytes`."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from quintet.executor.checkpoints.quant.decode import Coded
from quintet.executor.checkpoints.quant.formats.bitsandbytes import TABLES
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.wire.errors import ConfigError


def decode(scheme: Scheme, tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int) -> Coded:
    """See `quintet.executor.checkpoints.quant.decode.Decoder`."""
    octets = tensors["weight"].flatten()[begin * depth // 2 : end * depth // 2]
    codes = torch.stack((octets >> 4, octets & 15), dim=1).view(end - begin, depth)
    groups = depth // scheme.group
    absmax = tensors["weight.absmax"][begin * groups : end * groups]
    if absmax.dtype is torch.uint8:
        state = _state(tensors)
        size = state.get("nested_blocksize", 256)
        offset = state.get("nested_offset")
        if size != 256 or not isinstance(offset, float):
            raise ConfigError(
                f"quant_state has nested_blocksize {size!r:.40} (must be 256) and nested_offset {offset!r:.40} (must be a float)"
            )
        of_block = torch.arange(begin * groups, end * groups) // 256
        absmax = (
            tensors["weight.nested_quant_map"][absmax.int()] * tensors["weight.nested_absmax"][of_block]
            + offset
        )
    known = torch.tensor(TABLES[scheme.table])
    table = tensors.get("weight.quant_map", known)  # dummy weights have none
    if not torch.allclose(table.float(), known, rtol=0, atol=1e-6):
        raise ConfigError(
            f"weight.quant_map is not the table of {scheme.table}: download the checkpoint again"
        )
    return Coded(
        codes,
        absmax.float().view(end - begin, groups),
        None,
        0,
        scheme.group,
        table=known,
    )


def _state(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    for ending, tensor in tensors.items():
        if "quant_state" in ending:
            try:
                state = json.loads(bytes(tensor.tolist()))
            except ValueError:
                break
            if isinstance(state, dict):
                return state
    raise ConfigError(
        "no readable weight.quant_state (the quantization of the scales): download the checkpoint again"
    )
