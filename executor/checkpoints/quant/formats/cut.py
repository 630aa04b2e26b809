"""Select the part of a quantized layer's tensors that belongs to one rank's inputs.

    inputs              0 … 127 | 128 … 255 | 256 … 383 | …    a rank has whole groups, in whole words of codes
    codes               those of its inputs, in each row
    outliers            those of its inputs; others become zeros
    scales, zero points those of its groups; values of a whole row are shared by all ranks

Rows are taken afterwards, in chunks, as of an undivided layer (`quintet.executor.checkpoints.quant.source`). Imports
no torch: the check runs before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quintet.executor.checkpoints.quant.formats.scheme import Packing, Scheme, Stored
from quintet.executor.model_config.share import KeptRange

if TYPE_CHECKING:
    import torch

DECODER = "quintet.executor.checkpoints.quant.decode:decode"
"""Decoder with a known tensor layout. Each other decoder has its own."""


def why_not(scheme: Scheme, kept: KeptRange) -> str | None:
    """Return the reason why a rank cannot read these inputs alone; None if it can."""
    if (scheme.decoder != DECODER and not scheme.row_tables) or scheme.table:
        return "tensors of this format cannot be divided between ranks"
    if scheme.order is not None:
        return "inputs are grouped by activation order (desc_act), so each rank has inputs of all groups"
    if scheme.input_factors is not None:
        return "layers with input factors cannot be divided between ranks"
    group = scheme.group
    if group and (kept.begin % group or (kept.end % group and kept.end != kept.whole)):
        return f"a rank would have inputs {kept.begin} to {kept.end}, not whole groups of {group}"
    codes, _, *others = scheme.stored
    spans = [(codes, scheme.codes, kept)]
    if group and scheme.zeros is not None:
        spans.append((others[0], scheme.zeros, _groups(scheme, kept)))
    if any(packing is not None and _has_part_of_word(each, packing, span) for each, packing, span in spans):
        return f"a rank would have inputs {kept.begin} to {kept.end}, not whole words of codes"
    return None


def of_inputs(
    scheme: Scheme, tensors: Mapping[str, torch.Tensor], kept: KeptRange
) -> dict[str, torch.Tensor]:
    """Return views of the layer's tensors restricted to these inputs. Requires `why_not` to return None."""
    codes, scales, *others = scheme.stored
    cut = dict(tensors)
    cut[codes.ending] = _inputs_of(tensors[codes.ending], codes, scheme.codes, kept)
    if scheme.row_tables:
        return cut | _outliers_of(tensors, kept)
    if not scheme.group:
        return cut
    groups = _groups(scheme, kept)
    dimension = 0 if scheme.scale_transposed else 1
    cut[scales.ending] = tensors[scales.ending].narrow(dimension, groups.begin, groups.count)
    if scheme.zeros is not None or scheme.has_int8_zeros:
        zeros = others[0]
        cut[zeros.ending] = _inputs_of(tensors[zeros.ending], zeros, scheme.zeros, groups)
    return cut


def _outliers_of(tensors: Mapping[str, torch.Tensor], kept: KeptRange) -> dict[str, torch.Tensor]:
    """Return outliers (`quintet.executor.checkpoints.quant.formats.squeezellm`) restricted to these inputs.

    Outliers of other inputs become zeros at index 0.
    """
    cut = {}
    if "cols" in tensors:
        columns = tensors["cols"]
        before = (columns >= 0) & (columns < kept.begin)
        after = (columns >= kept.end) & (columns < kept.whole)
        cut["cols"] = (columns - kept.begin).masked_fill(before | after, 0)
        cut["vals"] = tensors["vals"].masked_fill(before | after, 0)
    if "full_rows" in tensors:
        cut["full_rows"] = tensors["full_rows"].narrow(0, kept.begin, kept.count)
    return cut


def _groups(scheme: Scheme, kept: KeptRange) -> KeptRange:
    """Return the groups that contain these inputs."""
    return KeptRange(kept.begin // scheme.group, -(-kept.end // scheme.group), -(-kept.whole // scheme.group))


def _inputs_of(
    tensor: torch.Tensor, stored: Stored, packing: Packing | None, kept: KeptRange
) -> torch.Tensor:
    """Return the part of a tensor for these inputs or groups; packing: None for one element each."""
    if packing is None:
        return tensor.narrow(1, kept.begin, kept.count)
    begin, end = kept.begin, kept.end
    if packing.packed_along == "depth":
        word_bits = _word_bits(stored, packing)
        begin, end = begin * packing.bits // word_bits, -(-end * packing.bits // word_bits)
    return tensor.narrow(0 if packing.transposed else 1, begin, end - begin)


def _word_bits(stored: Stored, packing: Packing) -> int:
    """Return the bits of one element; byte-packed codes of whole rows do not depend on it."""
    return 8 if "U8" in stored.kinds else packing.word_bits


def _has_part_of_word(stored: Stored, packing: Packing, kept: KeptRange) -> bool:
    """Return True if a word mixes codes of these inputs and of others."""
    if packing.packed_along != "depth":
        return False
    borders = [kept.begin] if kept.end == kept.whole else [kept.begin, kept.end]
    return any(border * packing.bits % _word_bits(stored, packing) for border in borders)
