"""GGUF mixes: the type of each tensor by the mix's name.

Names and choices follow llama.cpp (``llama_tensor_get_type`` in llama-quant.cpp). More bits go to values and downs in
the first and last eighth of the layers and every third one between, to the output layer, and to a tied embedding.
Small tensors stay in float32: vectors, routers, convolutions, positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quintet.executor.checkpoints.gguf.types import BY_NAME, GgmlType

_FALLBACK = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Replacement with blocks of 32 and at least the same quality, for rows that are not multiples of 256."""
_KEPT = re.compile(r"ffn_gate_inp|ssm_conv1d|shortconv\.conv|position_embd|rope_")
"""Matrices that stay in float32: routers, convolutions, positions."""
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Mix:
    """A named mix."""

    file_type: str
    """Name in the `gguf` package's LlamaFileType."""
    usual: str
    better: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """By part of a layer: types with a class of layers (an argument of `_is_among`); the first match wins."""
    output: str | None = None
    """Type of the output layer; None: the usual."""
    words: str = ""
    """Description for messages."""


@dataclass(frozen=True, slots=True)
class Model:
    """Properties of a model that determine types."""

    num_layers: int
    is_tied: bool
    """True: the embedding is the output layer."""
    heads_per_kv: int
    """Query heads for each KV head."""


def _downs(*types: tuple[str, str]) -> dict[str, tuple[tuple[str, str], ...]]:
    return {"ffn_down": types, "ffn_down_exps": types}


_MORE = {"attn_v": (("Q6_K", "more"),), **_downs(("Q6_K", "more"))}
_TABLE = {"attn_v": (("Q5_K", "shared"),), **_downs(("Q5_K", "first eighth"))}

_ALL = {name: ((name, "all"),) for name in BY_NAME}

MIXES = {
    "f32": Mix("ALL_F32", "F32", words="not quantized: float32"),
    "f16": Mix("MOSTLY_F16", "F16", words="not quantized: float16"),
    "bf16": Mix("MOSTLY_BF16", "BF16", words="not quantized: bfloat16"),
    "q8_0": Mix("MOSTLY_Q8_0", "Q8_0", words="8 bits in groups of 32"),
    "q6_k": Mix("MOSTLY_Q6_K", "Q6_K", words="6 bits in groups of 16"),
    "q5_1": Mix("MOSTLY_Q5_1", "Q5_1", output="Q6_K", words="5 bits and a minimum, in groups of 32"),
    "q5_k_m": Mix(
        "MOSTLY_Q5_K_M",
        "Q5_K",
        {**_MORE, "attn_qkv": _ALL["Q6_K"]},
        "Q6_K",
        "5 bits, 6 where it matters most",
    ),
    "q5_0": Mix("MOSTLY_Q5_0", "Q5_0", output="Q6_K", words="5 bits in groups of 32"),
    "q5_k_s": Mix("MOSTLY_Q5_K_S", "Q5_K", output="Q6_K", words="5 bits"),
    "q4_1": Mix("MOSTLY_Q4_1", "Q4_1", output="Q6_K", words="4 bits and a minimum, in groups of 32"),
    "q4_k_m": Mix(
        "MOSTLY_Q4_K_M",
        "Q4_K",
        {**_MORE, "attn_qkv": _ALL["Q5_K"]},
        "Q6_K",
        "4 bits, 6 where it matters most",
    ),
    "iq4_nl": Mix("MOSTLY_IQ4_NL", "IQ4_NL", _TABLE, "Q6_K", "4 bits of a table"),
    "q4_k_s": Mix(
        "MOSTLY_Q4_K_S",
        "Q4_K",
        {"attn_v": (("Q5_K", "first four"),), **_downs(("Q5_K", "first eighth"))},
        "Q6_K",
        "4 bits, 5 in the first layers",
    ),
    "q4_0": Mix("MOSTLY_Q4_0", "Q4_0", output="Q6_K", words="4 bits in groups of 32"),
    "iq4_xs": Mix("MOSTLY_IQ4_XS", "IQ4_XS", _TABLE, "Q6_K", "4 bits of a table, in less bytes"),
    "q3_k_m": Mix(
        "MOSTLY_Q3_K_M",
        "Q3_K",
        {
            "attn_v": (("Q5_K", "first two"), ("Q4_K", "all")),
            "attn_output": _ALL["Q4_K"],
            "attn_qkv": _ALL["Q4_K"],
            **_downs(("Q5_K", "first sixteenth"), ("Q4_K", "all")),
        },
        "Q6_K",
        "3 bits, 4 where it matters most",
    ),
    "q2_k": Mix(
        "MOSTLY_Q2_K",
        "Q2_K",
        {
            "attn_v": (("Q4_K", "shared"), ("Q3_K", "all")),
            "attn_output": _ALL["Q3_K"],
            "attn_qkv": _ALL["Q3_K"],
            **_downs(("Q3_K", "all")),
        },
        "Q6_K",
        "2 bits, 3 and 4 where it matters most",
    ),
}
"""Keyed by name, largest first."""


def type_of(mix: Mix, name: str, shape: tuple[int, ...], model: Model) -> GgmlType:
    """Return the type of a tensor of the file."""
    if len(shape) == 1 or not name.endswith(".weight") or _KEPT.search(name):
        return BY_NAME["F32"]
    kind = mix.usual
    found = _BLOCK.fullmatch(name)
    if name == "output.weight" or (model.is_tied and name == "token_embd.weight"):
        kind = mix.output or kind
    elif found is not None:
        better = (
            each for each, which in mix.better.get(found[2], ()) if _is_among(which, int(found[1]), model)
        )
        kind = next(better, kind)
    if shape[-1] % BY_NAME[kind].block:
        kind = _FALLBACK.get(kind, kind)
    return BY_NAME[kind] if shape[-1] % BY_NAME[kind].block == 0 else BY_NAME["F16"]


def _is_among(which: str, layer: int, model: Model) -> bool:
    """Return True if a layer belongs to a class that gets more bits."""
    count = model.num_layers
    first = {"first two": 2, "first four": 4, "first eighth": count // 8, "first sixteenth": count // 16}
    match which:
        case "all":
            return True
        case "shared":  # few KV heads cost little
            return model.heads_per_kv >= 4
        case "more":
            eighth = count // 8
            return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2
    return layer < first[which]
