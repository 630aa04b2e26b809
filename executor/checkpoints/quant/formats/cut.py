"""Which numbers of a quantized layer's tensors a rank reads that has some of its inputs: nothing else is known of it elsewhere.

    inputs          0 … 127 | 128 … 255 | 256 … 383 | …      a rank has whole groups of them, in whole words of codes
    codes           those of its inputs, in each row
    outliers        those of its inputs; of others nothing is left
    scales, zeros   those of its groups; what a whole row has is everybody's

Rows are taken behind this, some at a time, as they are of a layer that is not divided
(`quintet.executor.checkpoints.quant.source`). Imports no torch: whether ranks can share a checkpoint is asked before
anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quintet.executor.checkpoints.quant.formats.scheme import Packing, Scheme, Stored
from quintet.executor.model_config.share import KeptRange

if TYPE_CHECKING:
    import torch

DECODER = "quintet.executor.checkpoints.quant.decode:decode"
"""Whose tensors are known here: those of other formats are laid out each in its own way."""


def why_not(scheme: Scheme, kept: KeptRange) -> str | None:
    """Return why no rank can read these inputs of a layer alone; None if one can."""
    if (scheme.decoder != DECODER and not scheme.row_tables) or scheme.table:
        return "tensors of this format are not divided yet"
    if scheme.order is not None:
        return "its inputs are grouped in the order of activations, so those of a rank are in all groups"
    if scheme.input_factors is not None:
        return "inputs that are multiplied before are not divided yet"
    group = scheme.group
    if group and (kept.begin % group or (kept.end % group and kept.end != kept.whole)):
        return f"a rank would have inputs {kept.begin} to {kept.end}, no whole groups of {group}"
    codes, _, *others = scheme.stored
    spans = [(codes, scheme.codes, kept)]
    if group and scheme.zeros is not None:
        spans.append((others[0], scheme.zeros, _groups(scheme, kept)))
    if any(packing is not None and _has_part_of_word(each, packing, span) for each, packing, span in spans):
        return f"a rank would have inputs {kept.begin} to {kept.end}, whose codes are no whole words"
    return None


def of_inputs(
    scheme: Scheme, tensors: Mapping[str, torch.Tensor], kept: KeptRange
) -> dict[str, torch.Tensor]:
    """Return the layer's tensors, views of them, as if these were all its inputs. Only where `why_not` says nothing."""
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
    """Return what is added to the numbers of tables (`quintet.executor.checkpoints.quant.formats.squeezellm`): of
    other inputs zeros, to the first one of these.
    """
    cut = {}
    if "cols" in tensors:
        columns = tensors["cols"]
        before, behind = (
            (columns >= 0) & (columns < kept.begin),
            (columns >= kept.end) & (columns < kept.whole),
        )
        cut["cols"] = (columns - kept.begin).masked_fill(before | behind, 0)
        cut["vals"] = tensors["vals"].masked_fill(before | behind, 0)
    if "full_rows" in tensors:
        cut["full_rows"] = tensors["full_rows"].narrow(0, kept.begin, kept.count)
    return cut


def _groups(scheme: Scheme, kept: KeptRange) -> KeptRange:
    """Return the groups of which all these inputs are."""
    return KeptRange(kept.begin // scheme.group, -(-kept.end // scheme.group), -(-kept.whole // scheme.group))


def _inputs_of(
    tensor: torch.Tensor, stored: Stored, packing: Packing | None, kept: KeptRange
) -> torch.Tensor:
    """Return what belongs to these inputs, or groups of inputs; packing: None where each has a number of its own."""
    if packing is None:
        return tensor.narrow(1, kept.begin, kept.count)
    begin, end = kept.begin, kept.end
    if packing.neighbours == "depth":
        word_bits = _word_bits(stored, packing)
        begin, end = begin * packing.bits // word_bits, -(-end * packing.bits // word_bits)
    return tensor.narrow(0 if packing.transposed else 1, begin, end - begin)


def _word_bits(stored: Stored, packing: Packing) -> int:
    """Return those of the tensor's numbers: of codes in bytes it does not matter to who reads whole rows of them."""
    return 8 if "U8" in stored.kinds else packing.word_bits


def _has_part_of_word(stored: Stored, packing: Packing, kept: KeptRange) -> bool:
    """Whether a word has codes of these inputs and of others: it would have to be taken apart."""
    if packing.neighbours != "depth":
        return False
    borders = [kept.begin] if kept.end == kept.whole else [kept.begin, kept.end]
    return any(border * packing.bits % _word_bits(stored, packing) for border in borders)
