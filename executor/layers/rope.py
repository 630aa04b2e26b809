"""Rotary position embedding: from a model card's settings to cosines and sines.

Every kind of scaling that transformers knows is here, written from its paper or its own description:

- ``linear``: position interpolation (Chen et al., "Extending context window via positional interpolation", 2023);
- ``dynamic``: NTK-aware scaling by the length in use (bloc97 and emozilla, 2023);
- ``yarn``: Peng et al., "YaRN: efficient context window extension of large language models", 2023;
- ``llama3``: the piecewise rule of Meta's Llama 3.1 release, 2024;
- ``longrope``: Ding et al., "LongRoPE: extending LLM context window beyond 2 million tokens", 2024.

``dynamic`` and ``longrope`` depend on "the length in use". transformers takes the longest of the batch at that step, so
that a token's rotation would depend on its neighbours and on how a prompt was cut into chunks. Here the length of a
token is the longer of its prompt and its own position plus one: what transformers does for a request alone, whatever
the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quintet.wire.errors import ConfigError

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Settings of one model, defaults filled in."""

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    """The card's ``max_position_embeddings``."""
    original_positions: int
    """Context length of pretraining, for the kinds that extend it."""
    parameters: Mapping[str, Any]
    """The card's own dictionary, for the settings of one kind."""

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation depends on more than its position."""
        return self.kind in {"dynamic", "longrope"}


def rope_spec(card: Mapping[str, Any], head_dim: int, max_positions: int, where: str) -> RopeSpec:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (older cards).

    ``where`` names the file for error messages.
    """
    parameters = dict(card.get("rope_parameters") or card.get("rope_scaling") or {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in KINDS:
        raise ConfigError(f"{where}: rope type {kind!r} is unknown; known are {', '.join(KINDS)}")
    for key in _REQUIRED.get(kind, ()):
        if parameters.get(key) is None:
            raise ConfigError(f"{where}: rope type {kind!r} needs {key!r} in its parameters")
    theta = parameters.get("rope_theta") or card.get("rope_theta") or 10000.0
    share = parameters.get("partial_rotary_factor") or card.get("partial_rotary_factor") or 1.0
    original = (
        card.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or max_positions
    )
    return RopeSpec(kind, float(theta), int(head_dim * share), max_positions, int(original), parameters)


_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


class Rope:
    """Cosines and sines for the tokens of a step. One per model; computed once per step, used by every layer."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        frequencies, self._scale = _frequencies(spec)
        self._frequencies = frequencies.to(device)
        self._long_frequencies: torch.Tensor | None = None
        if spec.kind == "longrope":
            self._long_frequencies = _scaled_by(spec, "long_factor").to(device)

    def cos_sin(
        self, positions: torch.Tensor, lengths: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines ``[num_tokens, 1, rotary_dim]``.

        positions: ``[num_tokens]``; lengths: ``[num_tokens]``, the length each token was computed for, needed where
        `RopeSpec.depends_on_length`.
        """
        frequencies = self._frequencies
        if lengths is not None and self.spec.depends_on_length:
            frequencies = self._by_length(lengths)  # [num_tokens, rotary_dim / 2]
        angles = positions.float().unsqueeze(1) * frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)

    def _by_length(self, lengths: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if self._long_frequencies is not None:
            is_long = (lengths > spec.original_positions).unsqueeze(1)
            return torch.where(is_long, self._long_frequencies, self._frequencies)
        factor, dim = float(spec.parameters["factor"]), spec.rotary_dim
        stretch = lengths.clamp(min=spec.max_positions).double() * (factor / spec.max_positions) - (
            factor - 1
        )
        bases = spec.theta * stretch ** (dim / (dim - 2))
        return (1.0 / bases.unsqueeze(1) ** _exponents(dim, lengths.device).double()).float()


def _exponents(dim: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Return ``(frequencies [rotary_dim / 2], scale of cosines and sines)`` for lengths within the original context."""
    plain = 1.0 / spec.theta ** _exponents(spec.rotary_dim)
    if spec.kind == "linear":
        return plain / float(spec.parameters["factor"]), 1.0
    if spec.kind == "llama3":
        return _llama3(plain, spec), 1.0
    if spec.kind == "yarn":
        return _yarn(spec)
    if spec.kind == "longrope":
        return _scaled_by(spec, "short_factor"), _longrope_scale(spec)
    return plain, 1.0


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Keep short waves, stretch long ones by ``factor``, and blend in between."""
    factor = float(spec.parameters["factor"])
    low, high = float(spec.parameters["low_freq_factor"]), float(spec.parameters["high_freq_factor"])
    wavelengths = 2 * math.pi / plain
    stretched = plain / factor
    blend = (spec.original_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * stretched + blend * plain
    frequencies = torch.where(wavelengths > spec.original_positions / low, stretched, plain)
    between = (wavelengths >= spec.original_positions / high) & (wavelengths <= spec.original_positions / low)
    return torch.where(between, blended, frequencies)


def _yarn(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Interpolate dimensions that turn less than ``beta_slow`` times in the original context, keep those that turn more
    than ``beta_fast`` times, and ramp in between (section 3.2); scale attention by temperature (section 3.3)."""
    parameters, dim = spec.parameters, spec.rotary_dim
    factor = float(parameters.get("factor") or spec.max_positions / spec.original_positions)

    def dimension_turning(times: float) -> float:
        return dim * math.log(spec.original_positions / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension_turning(parameters.get("beta_fast") or 32)
    high = dimension_turning(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    waves = spec.theta ** _exponents(dim)
    frequencies = (1.0 / (factor * waves)) * ramp + (1.0 / waves) * (1 - ramp)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            scale = temperature(mscale) / temperature(mscale_all_dim)
        else:
            scale = temperature(1.0)
    return frequencies, float(scale)


def _scaled_by(spec: RopeSpec, key: str) -> torch.Tensor:
    """Return the frequencies divided by LongRoPE's factor of each dimension."""
    factors = torch.tensor(spec.parameters[key], dtype=torch.float32)
    if len(factors) != spec.rotary_dim // 2:
        raise ConfigError(
            f"rope: {key} has {len(factors)} numbers; it needs one per pair of rotary dimensions, {spec.rotary_dim // 2}"
        )
    return 1.0 / (factors * spec.theta ** _exponents(spec.rotary_dim))


def _longrope_scale(spec: RopeSpec) -> float:
    given = spec.parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(spec.parameters.get("factor") or spec.max_positions / spec.original_positions)
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(spec.original_positions))
