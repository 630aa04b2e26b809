"""Description of one flag, and the readers of values: vLLM's names, token counts with a unit, JSON objects."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.wire.errors import ConfigError

FLAG = "flag"
"""Key of a field's metadata."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Help text and parsing of one field of `Options`."""

    help: str
    metavar: str | None
    default_text: str | None
    """Default in words, for fields with the default None."""
    read: Callable[[object, str], object] | None
    """Parser of the given value; takes the value and the flag's name."""
    aliases: Mapping[str, str]
    """Alternative name -> choice."""
    takes_several: bool
    """True if one occurrence of a list flag accepts several values."""


def flag(
    default: Any,
    text: str,
    metavar: str | None = None,
    default_text: str | None = None,
    *,
    read: Callable[[object, str], object] | None = None,
    aliases: Mapping[str, str] | None = None,
    takes_several: bool = False,
) -> Any:
    """Return a field of `Options` with this default, described by a `Flag`."""
    described = {FLAG: Flag(text, metavar, default_text, read, aliases or {}, takes_several)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=described)
    return field(default=default, metadata=described)


def json_flag(text: str) -> Any:
    """Return a field of `Options` with a JSON object as its value; empty by default."""
    return flag({}, text, "JSON", "none", read=json_object)


def option(key: str) -> str:
    """Return the command-line spelling of a key."""
    return "--" + key.replace("_", "-")


_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
}  # fmt: skip
"""As in vLLM: lower-case units are powers of 1000, upper-case units powers of 1024."""

BOOLEANS = {"true": True, "false": False}
"""Values of switches as text."""

DTYPES = {
    **dict.fromkeys(("half", "fp16", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("float", "torch.float32"), "float32"),
}
"""Other names of data types: vLLM's, and those that ``LLM(dtype=torch.bfloat16)`` has as text."""

LOAD_FORMATS = (
    "safetensors", "hf", "pt", "gguf", "npcache", "mistral", "fastsafetensors", "bitsandbytes", "runai_streamer",
    "runai_streamer_sharded", "instanttensor", "modelexpress",
)  # fmt: skip
"""vLLM's values of ``--load-format`` for checkpoints, which are detected here."""

QUANTIZATION_ALIASES = {
    **dict.fromkeys(("awq_marlin", "cpu_awq"), "awq"),
    **dict.fromkeys(("gptq_marlin", "gptq_marlin_24"), "gptq"),
    **dict.fromkeys(("auto_round", "inc"), "auto-round"),
    **dict.fromkeys(("modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed"), "modelopt"),
    "int8_per_channel_weight_only": "int8",
    **dict.fromkeys(("ipex", "moe_wna16", "marlin"), "none"),
}
"""vLLM's names of formats. The last ones are kernels: the checkpoint's format is detected."""


def count(value: object, flag: str) -> object:
    """Parse a token count: ``8k`` is 8000, ``8K`` is 8192; None for ``auto`` and -1. Raises `ConfigError`."""
    if value == -1 or (isinstance(value, str) and value.strip() in {"auto", "-1"}):
        return None
    if not isinstance(value, str):
        return value
    found = _COUNT.fullmatch(value.strip())
    number = float(found[1]) * _UNITS[found[2]] if found is not None else 0.5
    if not number.is_integer():
        raise ConfigError(f"{flag} is {value!r}; give an integer, optionally with a unit (8k, 8K), or auto")
    return int(number)


def boolean(value: object) -> object:
    """Return the value of a switch, which YAML files and Helm values may quote; other values unchanged."""
    return BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


def json_object(value: object, flag: str) -> dict[str, Any]:
    """Return a JSON object given as text or as a dictionary. Raises `ConfigError`."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag} is {value!r:.100}, which is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} is {value!r:.100}; give a JSON object")
    return {str(key): each for key, each in found.items()}
