"""From SqueezeLLM's tensors to rows; see `quintet.executor.quant.formats.squeezellm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from quintet.executor.ops.packed_tables import TABLE_SIZE, Outliers
from quintet.executor.quant.decode import Coded, unpacked
from quintet.executor.quant.formats.scheme import Scheme
from quintet.wire.errors import ConfigError


def decode(scheme: Scheme, tensors: Mapping[str, torch.Tensor], depth: int, begin: int, end: int) -> Coded:
    """See `quintet.executor.quant.decode.Decoder`."""
    assert scheme.codes is not None
    codes = unpacked(scheme.codes, tensors["qweight"], range(begin, end), depth)
    tables = tensors["lookup_table"][begin:end].float()
    tables = torch.nn.functional.pad(tables, (0, TABLE_SIZE - tables.shape[1]))
    coded = Coded(codes, torch.ones(end - begin, 1), None, 0, 0, row_tables=tables)
    if "rows" not in tensors and "full_rows" not in tensors:
        return coded
    numbers = coded.floats()
    others = torch.zeros(numbers.shape, dtype=torch.bool)  # what something is added to
    if "rows" in tensors:
        others[_add_outliers(numbers, tensors, begin, end)] = True
    if "full_rows" in tensors:
        for i, row in enumerate(tensors["full_row_indices"].tolist()):
            if begin <= row < end:
                numbers[row - begin] += tensors["full_rows"][:, i]
                others[row - begin] = True
    ends = others.sum(1).cumsum(0)
    its = Outliers(torch.nn.functional.pad(ends, (1, 0)), others.nonzero()[:, 1], numbers[others])
    return replace(coded, outliers=its)


def _add_outliers(
    numbers: torch.Tensor, tensors: Mapping[str, torch.Tensor], begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of what was added."""
    ends, columns = tensors["rows"][begin : end + 1].long(), tensors["cols"]
    counts = ends.diff()
    first, last = int(ends[0]), int(ends[-1])
    if first < 0 or last > len(columns) or bool((counts < 0).any()):
        raise ConfigError(
            f"its rows do not divide the {len(columns)} outliers among themselves: download it again"
        )
    mine = columns[first:last].long()
    if len(mine) and (int(mine.min()) < 0 or int(mine.max()) >= numbers.shape[1]):
        raise ConfigError(
            f"its cols name inputs from {int(mine.min())} to {int(mine.max())} of {numbers.shape[1]}: download it again"
        )
    added = tensors["vals"][first:last]
    places = torch.repeat_interleave(torch.arange(end - begin), counts), mine
    numbers.index_put_(places, added, accumulate=True)
    return places[0][added != 0], mine[added != 0]
