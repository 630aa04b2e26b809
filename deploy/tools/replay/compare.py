"""Comparison of two frames by message fields, ignoring send times and measured durations."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quintet.wire import dropped, kv_tiers, messages, step, supervision
from quintet.wire.request import RequestSpec

COLUMNS: Mapping[type[msgspec.Struct], Mapping[str, str]] = {
    messages.TokenPrompt: {"token_ids": "i"},
    RequestSpec: {"output_ids": "i"},
    messages.Admit: {"prompt_ids": "i"},
    messages.Live: {"request_ids": "q"},
    messages.InFlightReport: {"request_ids": "q", "attempts": "i"},
    messages.Unknown: {"request_ids": "q"},
    messages.Open: {"prompt_ids": "i", "output_ids": "i"},
    messages.Tokens: {
        "request_ids": "q",
        "first_indexes": "i",
        "num_tokens": "B",
        "token_ids": "i",
        "finishes": "B",
        "named_stops": "i",
        "closed": "q",
    },
    messages.StopHit: {"request_ids": "q", "attempts": "i"},
    messages.Started: {"prompt_ids": "i"},
    messages.Text: {"token_ids": "i"},
    messages.Tokenized: {"token_ids": "i"},
    messages.DetokenizeQuery: {"token_ids": "i"},
    step.NewRow: {"token_ids": "i"},
    step.StepPlan: {
        "freed": "i",
        "blocks": "i",
        "copies": "i",
        "slots": "i",
        "starts": "i",
        "counts": "i",
        "samples": "B",
        "drafts": "B",
        "swaps_out": "i",
        "swaps_in": "i",
    },
    step.TokenLogprobs: {"token_ids": "i", "logprobs": "f"},
    step.PromptLogprobs: {"ranks": "i", "token_ids": "i", "logprobs": "f"},
    step.StepResult: {"token_ids": "i", "num_tokens": "B", "num_drafts": "B", "failed": "i"},
    kv_tiers.Store: {"blocks": "i"},
    kv_tiers.Fetch: {"positions": "i", "host_blocks": "i"},
    kv_tiers.SearchResult: {"counts": "i"},
    kv_tiers.KvTierResults: {"fetched": "i", "missed": "i"},
}
"""Struct, field, and the `array` type code of its numbers."""


MEASURED = frozenset({"sent_ns", "wait_ns", "compute_ns"})
"""Fields with clock readings, which do not follow from the input."""

SHOWN = 12
"""Number of values of a column shown around a difference."""

_TAGGED = [
    member
    for module in (dropped, messages, step, supervision)
    for member in vars(module).values()
    if isinstance(member, type)
    and issubclass(member, msgspec.Struct)
    and member.__module__ == module.__name__
    and member.__struct_config__.tag is not None
    and member.__struct_config__.tag not in ("text", "ids", "chat")
]
_decode: Any = msgspec.msgpack.Decoder(functools.reduce(operator.or_, _TAGGED)).decode


@dataclass(frozen=True, slots=True)
class Difference:
    """The first field in which two messages differ."""

    message: str
    """Type of the recorded message, with its step number if it has one."""
    field: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return f"{self.message}.{self.field}:\n  recorded {self.recorded}\n  replayed {self.replayed}"


def decoded(payload: bytes) -> msgspec.Struct:
    """Decode a payload of any message type."""
    message: msgspec.Struct = _decode(payload)
    return message


def without_times(payload: bytes) -> bytes:
    """Return the payload with clock readings set to 0."""
    message = decoded(payload)
    for name in MEASURED.intersection(message.__struct_fields__):
        setattr(message, name, 0)
    if isinstance(message, messages.InFlightReport):
        message.request_ids = message.attempts = b""  # depends on timing of lanes
    return msgspec.msgpack.encode(message)


def difference(recorded: bytes, replayed: bytes) -> Difference | None:
    """Return the first relevant difference of two payloads, or None."""
    if recorded == replayed:
        return None
    before, after = decoded(recorded), decoded(replayed)
    name = type(before).__name__
    if hasattr(before, "step"):
        name += f" of step {before.step}"
    if type(before) is not type(after):
        return Difference(name, "kind", type(before).__name__, type(after).__name__)
    found = _differ(before, after, "")
    return None if found is None else Difference(name, *found)


def _differ(before: object, after: object, path: str) -> tuple[str, str, str] | None:
    """Compare two values recursively; return path and both values of the first difference."""
    if isinstance(before, msgspec.Struct) and type(before) is type(after):
        columns = COLUMNS.get(type(before), {})
        for name in before.__struct_fields__:
            if name in MEASURED:
                continue
            one, other = getattr(before, name), getattr(after, name)
            if one != other:
                field_path = f"{path}.{name}" if path else name
                if name in columns and isinstance(one, bytes) and isinstance(other, bytes):
                    return _columns_differ(one, other, columns[name], field_path)
                found = _differ(one, other, field_path)
                if found is not None:
                    return found
        return None
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            found = _differ(one, other, f"{path}[{index}]")
            if found is not None:
                return found
        return None
    return None if before == after else (path, repr(before), repr(after))


def _columns_differ(before: bytes, after: bytes, code: str, path: str) -> tuple[str, str, str]:
    one, other = _column(before, code), _column(after, code)
    at = next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return f"{path}[{at}]", _around(one, at), _around(other, at)


def _column(column: bytes, code: str) -> array[Any]:
    values: array[Any] = array(code)
    values.frombytes(column[: len(column) // values.itemsize * values.itemsize])
    return values


def _around(values: array[Any], at: int) -> str:
    first = max(0, at - SHOWN // 2)
    shown = ", ".join(map(str, values[first : first + SHOWN]))
    before = "... " if first else ""
    after = " ..." if first + SHOWN < len(values) else ""
    return f"{before}{shown}{after} ({len(values)} in total)"
