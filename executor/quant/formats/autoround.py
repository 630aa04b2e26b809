"""AutoRound (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", 2023).

Its rounding is its own; what it saves are the tensors of GPTQ or AWQ, with bits of their own for some layers.
"""

from __future__ import annotations

import re
from dataclasses import replace

from quintet.executor.cards.card import ModelCard
from quintet.executor.quant.formats import awq, gptq
from quintet.executor.quant.formats.scheme import Format
from quintet.wire.errors import ConfigError

USUAL = "auto_round:auto_gptq"
FLOAT_BITS = 16


def recognise(card: ModelCard, section: ModelCard) -> Format:
    """Return the format that a card's ``quantization_config`` describes."""
    packing = section.values.get("packing_format") or section.values.get("backend") or USUAL
    if section.values.get("data_type", "int") != "int" or not isinstance(packing, str):
        raise ConfigError(
            f"{section.path}: {section.inside}data_type is {section.values.get('data_type')!r:.40}; of AutoRound's"
            " checkpoints those of integers load: export with the format 'auto_gptq', 'auto_awq' or 'llm_compressor'"
        )
    if "awq" in packing:
        return replace(awq.of(section), name="auto-round")
    if "gptq" not in packing:
        raise ConfigError(
            f"{section.path}: {section.inside}packing_format is {packing!r:.40}, which is not read; export with the format"
            " 'auto_gptq', 'auto_awq' or 'llm_compressor'"
        )
    numbers = gptq.numbers_of(section, gptq.Numbers(4, 128, True, False))
    return gptq.Gptq(
        "auto-round",
        numbers,
        zero_offset=1,
        of_output_layer=section.flag("lm_head", False),
        others=_others(section, numbers),
        ignored=("*.g_idx",),
    )


def _others(
    section: ModelCard, usual: gptq.Numbers
) -> tuple[tuple[re.Pattern[str], gptq.Numbers | None], ...]:
    """Return the layers of ``extra_config``: with other bits, or left as they are."""
    found = []
    extra = section.section("extra_config")
    for name in extra.values:
        its = extra.section(name)
        left_out = its.has("bits") and its.whole("bits", 1, 32) >= FLOAT_BITS
        found.append((re.compile(re.escape(name) + "$"), None if left_out else gptq.numbers_of(its, usual)))
    return tuple(found)
