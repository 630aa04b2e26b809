"""What a checkpoint's configuration asks of keys and values. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quintet.executor.cards.card import ModelCard

_STRATEGIES = {"attn_head": "a scale for each head", "token": "a scale for each token"}


@dataclass(frozen=True, slots=True)
class KvWish:
    """Of fewer bits than the model's format."""

    words: str
    """For people."""
    is_fp8: bool
    """Whether it is fp8 with one scale for a layer. Of other schemes nothing is read; keys and values stay as they are."""
    nearest: Literal["int8", "int4"] = "int8"
    """What the host stores likewise, with scales of its own."""

    def note(self, device: str) -> str:
        """Return what follows from it, for people, where nobody asks for anything else."""
        if self.is_fp8:
            return "keys and values are fp8, as the checkpoint says: --kv-cache-dtype model keeps them as they are"
        nearest = (
            f"--kv-cache-dtype {self.nearest}, with scales for each token's head, made as it comes,"
            if device == "cpu"
            else "--kv-cache-dtype fp8, with scales of 1,"
        )
        return (
            f"the checkpoint asks for keys and values in {self.words}, which is not read, so they keep the model's format:"
            f" {nearest} is nearest to it"
        )


def wish_of(card: ModelCard) -> KvWish | None:
    """Return it; None where the checkpoint asks for nothing."""
    for holder in (card, card.section("text_config")):
        if holder.has("quantization_config"):
            return _wish(holder.section("quantization_config"))
    return None


def _wish(section: ModelCard) -> KvWish | None:
    inner = section.section("quantization") if section.has("quantization") else section
    named = inner.values.get("kv_cache_quant_algo")  # ModelOpt's
    if named is None and isinstance(section.values.get("kv_cache_scheme"), str):  # as transformers has it
        named = section.values["kv_cache_scheme"]
    if named is not None:
        return KvWish(f"{named!s:.40}", named == "FP8", "int4" if "4" in str(named) else "int8")
    if not section.has("kv_cache_scheme"):
        return None
    values = section.section("kv_cache_scheme").values
    bits, kind, strategy = values.get("num_bits"), values.get("type", "int"), values.get("strategy", "tensor")
    symmetric, dynamic = values.get("symmetric", True), values.get("dynamic", False)
    is_fp8 = bits == 8 and kind == "float" and strategy == "tensor" and symmetric is True and not dynamic
    scales = _STRATEGIES.get(str(strategy), f"scales by {strategy!s:.20}") if strategy != "tensor" else ""
    words = [
        f"{kind!s:.20}s of {bits!s:.20} bits",
        *([scales] if scales else []),
        *(["scales that follow from the input"] if dynamic else []),
        *([] if symmetric is True else ["zero points"]),
    ]
    return KvWish(", ".join(words), is_fp8, "int4" if bits == 4 else "int8")
