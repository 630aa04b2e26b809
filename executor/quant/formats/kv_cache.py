"""Whether a checkpoint's configuration says that keys and values are kept in fp8. Imports no torch."""

from __future__ import annotations

from quintet.executor.cards.card import ModelCard


def has_fp8_kv(card: ModelCard) -> bool:
    """Whether it does, with one scale for a layer: of other schemes nothing is read, and keys and values stay as they are."""
    for holder in (card, card.section("text_config")):
        if holder.has("quantization_config"):
            return _says_fp8(holder.section("quantization_config"))
    return False


def _says_fp8(section: ModelCard) -> bool:
    inner = section.section("quantization") if section.has("quantization") else section
    if inner.has("kv_cache_quant_algo"):  # ModelOpt's
        return bool(inner.values["kv_cache_quant_algo"] == "FP8")
    if isinstance(section.values.get("kv_cache_scheme"), str):  # ModelOpt's, as transformers has it
        return bool(section.values["kv_cache_scheme"] == "FP8")
    scheme = section.section("kv_cache_scheme")
    return (
        scheme.values.get("num_bits") == 8
        and scheme.values.get("type", "int") == "float"
        and scheme.values.get("strategy", "tensor") == "tensor"
        and scheme.values.get("symmetric", True) is True
        and not scheme.values.get("dynamic", False)
    )
