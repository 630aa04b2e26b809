"""AWQ (Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023): 4 bits, zero
points.

AutoAWQ's layout ``gemm``; a word has the codes of rows 0 2 4 6 1 3 5 7 of eight:

    qweight  int32 [depth, rows / 8]      qzeros  int32 [groups, rows / 8]      scales  [groups, rows]

Layout ``gemv``; a word has the codes of eight adjacent inputs or groups. Zero points and scales are padded to whole
words:

    qweight  int32 [rows, depth / 8]      qzeros  int32 [rows, words]           scales  [rows, 8 words]
"""

from __future__ import annotations

from functools import partial

from quintet.executor.checkpoints.quant.formats.modules import is_part_of, word_list
from quintet.executor.checkpoints.quant.formats.scheme import (
    FLOATS,
    MOST_GROUP,
    Format,
    Packing,
    Scheme,
    Stored,
    StoredLayer,
    groups_in_words,
)
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

BITS, IN_WORD = 4, 8


def _scheme(group: int, version: str, left_out: tuple[str, ...], layer: StoredLayer) -> Scheme | None:
    """See `Format.scheme`. group: group size; 0: the whole row."""
    if layer.is_plain("qweight", is_left_out=layer.is_output_layer or is_part_of(layer, left_out)):
        return None
    rows, depth, size = layer.rows, layer.depth, group or layer.depth
    if (rows if version == "gemm" else depth) % IN_WORD or depth % size:
        layer.refuse(f"AWQ needs whole words of {IN_WORD} codes and whole groups of {size} inputs")
    groups, scale_kind = depth // size, layer.kind("scales")
    if version == "gemm":
        packing = Packing(BITS, "rows", transposed=True, evens_first=True)
        stored = (
            Stored("qweight", (depth, rows // IN_WORD), ("I32",)),
            Stored("scales", (groups, rows), FLOATS),
            Stored("qzeros", (groups, rows // IN_WORD), ("I32",)),
        )
        return Scheme(
            stored=stored,
            codes=packing,
            scale_transposed=True,
            scale_kind=scale_kind,
            group=group,
            zeros=packing,
        )
    step = {32: 4, 64: 2}.get(group, 1)
    words = (groups + IN_WORD * step - 1) // (IN_WORD * step) * step
    stored = (
        Stored("qweight", (rows, depth // IN_WORD), ("I32",)),
        Stored("scales", (rows, words * IN_WORD), FLOATS),
        Stored("qzeros", (rows, words), ("I32",)),
    )
    packing = Packing(BITS, "depth")
    return Scheme(stored=stored, codes=packing, scale_kind=scale_kind, group=size, zeros=packing)


def recognise(section: HfConfig) -> Format:
    bits = section.whole(("bits", "w_bit"), 1, 16, BITS)
    if bits != BITS:
        raise section.wrong(("bits", "w_bit"), "4: AutoAWQ saves no other bits")
    key = section.spelling(("version", "checkpoint_format"))
    version = str(section.values.get(key) or "gemm").lower()
    if version not in ("gemm", "gemv"):
        raise ConfigError(
            f"{section.path}: unsupported AWQ {key} {version!r:.40}, a layout for one kernel: use a checkpoint with"
            f" `{key}` 'gemm' or 'gemv'"
        )
    group = section.whole(("group_size", "q_group_size"), -1, MOST_GROUP, 128)
    if group == 0:
        raise section.wrong(("group_size", "q_group_size"), "-1 or a number of columns")
    group = max(group, 0)
    scheme = partial(_scheme, group, version, word_list(section, "modules_to_not_convert"))
    words = f"awq: 4 bits in {groups_in_words(group)}, zero points, laid out for {version}"
    return Format("awq", words, "qweight", scheme)
