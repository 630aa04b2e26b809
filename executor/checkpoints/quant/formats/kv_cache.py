"""KV cache format requested by a checkpoint's configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quintet.executor.model_config.hf_config import HfConfig

_STRATEGIES = {"attn_head": "a scale for each head", "token": "a scale for each token"}
_NAMED: Mapping[str, Literal["fp8", "int8"]] = {"FP8": "fp8", "INT8": "int8"}
"""ModelOpt's names; one scale for a layer."""


@dataclass(frozen=True, slots=True)
class KvFormat:
    """KV cache format with fewer bits than the model's number format."""

    words: str
    """Description for messages."""
    format: Literal["fp8", "int8"] | None
    """Format on the host; None: unsupported scheme, the KV cache keeps the model's number format."""
    by_head: bool = False
    """True: fp8 with a scale for each head, which GPU kernels do not support."""
    nearest: Literal["int8", "int4"] = "int8"
    """Nearest format on the host with run-time scales."""

    def format_on(self, device: str) -> Literal["fp8", "int8"] | None:
        """Return the format on a device; None: the model's number format."""
        return self.format if device == "cpu" or (self.format == "fp8" and not self.by_head) else None

    def note(self, device: str) -> str:
        """Return the log message about the format, for a run without ``--kv-cache-dtype``."""
        found = self.format_on(device)
        if found is not None:
            own = (
                ", with a scale for each token and head instead of the checkpoint's coarser scales"
                if found == "int8"
                else ""
            )
            return f"KV cache is {found} as the checkpoint requests{own}; --kv-cache-dtype model disables it"
        nearest = (
            f"; the nearest is --kv-cache-dtype {self.nearest} (run-time scales for each token and head)"
            if device == "cpu"
            else ""
            if self.by_head
            else "; the nearest is --kv-cache-dtype fp8 (scales of 1)"
        )
        return (
            f"the checkpoint requests a KV cache in {self.words}, which is not supported: it keeps the model's number format"
            f"{nearest}"
        )


def wish_of(hf_config: HfConfig) -> KvFormat | None:
    """Return the requested format; None if the checkpoint requests none."""
    for holder in (hf_config, hf_config.section("text_config")):
        if holder.has("quantization_config"):
            return _wish(holder.section("quantization_config"))
    return None


def _wish(section: HfConfig) -> KvFormat | None:
    inner = section.section("quantization") if section.has("quantization") else section
    named = inner.values.get("kv_cache_quant_algo")  # ModelOpt
    if named is None and isinstance(section.values.get("kv_cache_scheme"), str):  # transformers
        named = section.values["kv_cache_scheme"]
    if named is not None:
        return KvFormat(
            f"{named!s:.40}", _NAMED.get(str(named)), nearest="int4" if "4" in str(named) else "int8"
        )
    if not section.has("kv_cache_scheme"):
        return None
    return _of_scheme(section.section("kv_cache_scheme").values)


def _of_scheme(values: Mapping[str, object]) -> KvFormat:
    """Return the format of a compressed-tensors scheme."""
    bits, kind = values.get("num_bits"), values.get("type", "int")
    strategy, symmetric = values.get("strategy") or "tensor", values.get("symmetric", True)
    dynamic = bool(values.get("dynamic", False))
    is_usual = bits == 8 and symmetric is True
    is_fp8 = is_usual and kind == "float" and strategy in ("tensor", "attn_head") and not dynamic
    # int8 has a run-time scale for each token and head, at least as fine as any of these strategies.
    is_int8 = is_usual and kind == "int" and strategy in ("tensor", "attn_head", "token")
    scales = _STRATEGIES.get(str(strategy), f"scales by {strategy!s:.20}") if strategy != "tensor" else ""
    words = [
        f"{kind!s:.20}s of {bits!s:.20} bits",
        *([scales] if scales else []),
        *(["run-time scales"] if dynamic else []),
        *([] if symmetric is True else ["zero points"]),
    ]
    return KvFormat(
        ", ".join(words),
        "fp8" if is_fp8 else "int8" if is_int8 else None,
        is_fp8 and strategy == "attn_head",
        "int4" if bits == 4 else "int8",
    )
