"""Decode SqueezeLLM's tensors to rows; see `quintet.executor.checkpoints.quant.formats.squeezellm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quintet.executor.backends.cpu.ops.packed_tables import TABLE_SIZE, Outliers
from quintet.executor.checkpoints.quant.decode import Coded, unpacked
from quintet.executor.checkpoints.quant.formats.scheme import Scheme
from quintet.wire.errors import ConfigError


def decode(scheme: Scheme, tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int) -> Coded:
    """See `quintet.executor.checkpoints.quant.decode.Decoder`."""
    assert scheme.codes is not None
    codes = unpacked(scheme.codes, tensors["qweight"], range(begin, end), depth)
    tables = tensors["lookup_table"][begin:end].float()
    tables = torch.nn.functional.pad(tables, (0, TABLE_SIZE - tables.shape[1]))
    coded = Coded(codes, torch.ones(end - begin, 1), None, 0, 0, row_tables=tables)
    added = []
    if "rows" in tensors:
        added.append(_outliers(tensors, depth, begin, end))
    if "full_rows" in tensors:
        for i, row in enumerate(tensors["full_row_indices"].tolist()):
            if begin <= row < end:
                whole = torch.full((depth,), row - begin), torch.arange(depth), tensors["full_rows"][:, i]
                added.append(whole)
    if not added:
        return coded
    rows, inputs, numbers = (torch.cat(each) for each in zip(*added, strict=True))
    order = rows.argsort(stable=True)
    order = order[numbers[order] != 0]  # inputs of other ranks are zeroed
    begins = torch.searchsorted(rows[order], torch.arange(end - begin + 1))
    return replace(coded, outliers=Outliers(begins, inputs[order], numbers[order]))


def _outliers(
    tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row offsets, input indices and values of the sparse outliers."""
    ends, columns = tensors["rows"][begin : end + 1].long(), tensors["cols"]
    counts = ends.diff()
    first, last = int(ends[0]), int(ends[-1])
    if first < 0 or last > len(columns) or bool((counts < 0).any()):
        raise ConfigError(
            f"the row pointers of the {len(columns)} outliers are invalid: download the checkpoint again"
        )
    mine = columns[first:last].long()
    if len(mine) and (int(mine.min()) < 0 or int(mine.max()) >= depth):
        raise ConfigError(
            f"cols has inputs {int(mine.min())} to {int(mine.max())} of {depth}: download the checkpoint again"
        )
    return torch.repeat_interleave(torch.arange(end - begin), counts), mine, tensors["vals"][first:last]
