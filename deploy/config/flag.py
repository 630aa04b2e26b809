"""Description of one flag: help text, parsing and group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MODEL, NETWORK, SCHEDULING, MEMORY, PROCESSES, DEVICE = (
    "model", "network", "scheduling", "memory", "processes", "device",
)  # fmt: skip

GROUP_TITLES: dict[str, str] = {
    MODEL: "model and tokenizer",
    NETWORK: "network and API",
    SCHEDULING: "scheduling",
    MEMORY: "KV cache",
    DEVICE: "device",
    PROCESSES: "processes",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """Help text and parsing of one field of `Options`."""

    group: str
    help: str
    metavar: str | None = None
    default_text: str | None = None
    """Default in words, for fields with the default None."""
    read: Callable[[object, str], object] | None = None
    """Parser of the given value; takes the value and the flag's name."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative name -> choice."""
    takes_several: bool = False
    """True if one occurrence of a list flag accepts several values."""
