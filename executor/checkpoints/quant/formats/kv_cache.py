"""What a checkpoint's configuration asks of keys and values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quintet.executor.model_config.card import ModelCard

_STRATEGIES = {"attn_head": "a scale for each head", "token": "a scale for each token"}
_NAMED: Mapping[str, Literal["fp8", "int8"]] = {"FP8": "fp8", "INT8": "int8"}
"""ModelOpt's, with one scale for a layer."""


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Of fewer bits than the model's format."""

    words: str
    """For people."""
    format: Literal["fp8", "int8"] | None
    """What the host stores for it; None: of such schemes nothing is read, and keys and values stay as they are."""
    by_head: bool = False
    """Whether it is fp8 with a scale for each head, which a GPU's kernels do not take."""
    nearest: Literal["int8", "int4"] = "int8"
    """What the host stores likewise, with scales of its own."""

    def format_on(self, device: str) -> Literal["fp8", "int8"] | None:
        """Return what is stored for it on a device; None: the model's format."""
        return self.format if device == "cpu" or (self.format == "fp8" and not self.by_head) else None

    def note(self, device: str) -> str:
        """Return what follows from it, for people, where nobody asks for anything else."""
        found = self.format_on(device)
        if found is not None:
            own = (
                "; each token's head has its own scale, finer than the checkpoint's, which are not read"
                if found == "int8"
                else ""
            )
            return f"keys and values are {found}, as the checkpoint says{own}: --kv-cache-dtype model keeps them as they are"
        nearest = (
            f": --kv-cache-dtype {self.nearest}, with scales for each token's head, made as it comes, is nearest to it"
            if device == "cpu"
            else ""
            if self.by_head
            else ": --kv-cache-dtype fp8, with scales of 1, is nearest to it"
        )
        return (
            f"the checkpoint asks for keys and values in {self.words}, which is not read, so they keep the model's format"
            f"{nearest}"
        )


def wish_of(card: ModelCard) -> KvFormat | None:
    """Return it; None where the checkpoint asks for nothing."""
    for holder in (card, card.section("text_config")):
        if holder.has("quantization_config"):
            return _wish(holder.section("quantization_config"))
    return None


def _wish(section: ModelCard) -> KvFormat | None:
    inner = section.section("quantization") if section.has("quantization") else section
    named = inner.values.get("kv_cache_quant_algo")  # ModelOpt's
    if named is None and isinstance(section.values.get("kv_cache_scheme"), str):  # as transformers has it
        named = section.values["kv_cache_scheme"]
    if named is not None:
        return KvFormat(
            f"{named!s:.40}", _NAMED.get(str(named)), nearest="int4" if "4" in str(named) else "int8"
        )
    if not section.has("kv_cache_scheme"):
        return None
    return _of_scheme(section.section("kv_cache_scheme").values)


def _of_scheme(values: Mapping[str, object]) -> KvFormat:
    """Return what a scheme of compressed-tensors asks for."""
    bits, kind = values.get("num_bits"), values.get("type", "int")
    strategy, symmetric = values.get("strategy") or "tensor", values.get("symmetric", True)
    dynamic = bool(values.get("dynamic", False))
    is_usual = bits == 8 and symmetric is True
    is_fp8 = is_usual and kind == "float" and strategy in ("tensor", "attn_head") and not dynamic
    # A token's head has a scale here that follows from the input: whatever its numbers share a scale with is no less.
    is_int8 = is_usual and kind == "int" and strategy in ("tensor", "attn_head", "token")
    scales = _STRATEGIES.get(str(strategy), f"scales by {strategy!s:.20}") if strategy != "tensor" else ""
    words = [
        f"{kind!s:.20}s of {bits!s:.20} bits",
        *([scales] if scales else []),
        *(["scales that follow from the input"] if dynamic else []),
        *([] if symmetric is True else ["zero points"]),
    ]
    return KvFormat(
        ", ".join(words),
        "fp8" if is_fp8 else "int8" if is_int8 else None,
        is_fp8 and strategy == "attn_head",
        "int4" if bits == 4 else "int8",
    )
