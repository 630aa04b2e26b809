"""Rotary position embedding: cosines and sines from a config's settings.

Types of scaling, as in transformers:

- ``linear``: position interpolation (Chen et al., "Extending context window via positional interpolation", 2023);
- ``dynamic``: NTK-aware scaling by sequence length (bloc97 and emozilla, 2023);
- ``yarn``: Peng et al., "YaRN: efficient context window extension of large language models", 2023;
- ``llama3``: the piecewise rule of Meta's Llama 3.1 release, 2024;
- ``longrope``: Ding et al., "LongRoPE: extending LLM context window beyond 2 million tokens", 2024.

Types that transformers does not have:

- ``factors``: a divisor per frequency, as GGUF files store Llama 3.1's rule;
- ``stairs``: Qwen 1 (Bai et al., "Qwen technical report", 2023, section 2.3). NTK-aware scaling by 1, 3, 7, 15, … for
  prompts of up to 1, 2, 4, 8 times the trained length.

``dynamic`` and ``longrope`` depend on the sequence length. transformers uses the longest sequence of the batch, so a
token's rotation depends on the batch and on chunked prefill. Here a token's length is the maximum of its prompt
length and its position plus one. This equals transformers for a single request. ``stairs`` depends on the prompt
length only, as in Qwen's code.
"""

from __future__ import annotations

import math

import torch

from quintet.executor.model_config.rope import RopeSpec


class Rope:
    """Cosines and sines for the tokens of a step; computed once per step for all layers."""

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        self.spec = spec
        frequencies, self._scale = _frequencies(spec)
        self._frequencies = frequencies.to(device)
        self._long_frequencies: torch.Tensor | None = None
        if spec.kind == "longrope":
            self._long_frequencies = _scaled_by(spec, spec.long_factor).to(device)

    def cos_sin(
        self, positions: torch.Tensor, prompts: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines ``[num_tokens, 1, rotary_dim]``.

        positions: ``[num_tokens]``; prompts: ``[num_tokens]``, the length of each token's prompt, required if
        `RopeSpec.depends_on_length`.
        """
        frequencies = self._frequencies
        if prompts is not None and self.spec.depends_on_length:
            frequencies = self._by_length(positions, prompts)  # [num_tokens, rotary_dim / 2]
        angles = positions.float().unsqueeze(1) * frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)

    def _by_length(self, positions: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if spec.kind == "stairs":
            doublings = torch.log2(prompts.double() / spec.original_positions).ceil().clamp(min=0)
            return self._stretched(2.0 ** (doublings + 1) - 1)
        lengths = torch.maximum(prompts, positions + 1)
        if self._long_frequencies is not None:
            is_long = (lengths > spec.original_positions).unsqueeze(1)
            return torch.where(is_long, self._long_frequencies, self._frequencies)
        factor, most = _factor(spec), spec.max_positions
        return self._stretched(lengths.clamp(min=most).double() * (factor / most) - (factor - 1))

    def _stretched(self, stretch: torch.Tensor) -> torch.Tensor:
        """Return the NTK-aware frequencies of each token's base; stretch: float64 ``[num_tokens]``."""
        dim = self.spec.rotary_dim
        bases = self.spec.theta * stretch ** (dim / (dim - 2))
        return (1.0 / bases.unsqueeze(1) ** _exponents(dim, stretch.device).double()).float()


def _exponents(dim: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Return ``(frequencies [rotary_dim / 2], scale of cosines and sines)`` for lengths within the original context."""
    plain = 1.0 / spec.theta ** _exponents(spec.rotary_dim)
    if spec.kind == "linear":
        return plain / _factor(spec), 1.0
    if spec.kind == "llama3":
        return _llama3(plain, spec), 1.0
    if spec.kind == "yarn":
        return _yarn(spec)
    if spec.kind == "longrope":
        return _scaled_by(spec, spec.short_factor), _longrope_scale(spec)
    if spec.kind == "factors":
        return _scaled_by(spec, spec.short_factor), 1.0
    return plain, 1.0


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Keep short wavelengths, divide the frequencies of long ones by ``factor``, and interpolate in between."""
    factor, low, high = _factor(spec), spec.low_freq_factor, spec.high_freq_factor
    assert low is not None and high is not None, spec
    wavelengths = 2 * math.pi / plain
    stretched = plain / factor
    blend = (spec.original_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * stretched + blend * plain
    frequencies = torch.where(wavelengths > spec.original_positions / low, stretched, plain)
    between = (wavelengths >= spec.original_positions / high) & (wavelengths <= spec.original_positions / low)
    return torch.where(between, blended, frequencies)


def _yarn(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Interpolate dimensions by their number of turns in the original context.

    Below ``beta_slow`` turns: interpolate; above ``beta_fast``: keep; between: ramp (section 3.2). Attention is
    scaled by a temperature (section 3.3).
    """
    dim, factor = spec.rotary_dim, _factor(spec)

    def dimension_of_turns(times: float) -> float:
        return dim * math.log(spec.original_positions / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension_of_turns(spec.beta_fast), dimension_of_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    waves = spec.theta ** _exponents(dim)
    frequencies = (1.0 / (factor * waves)) * ramp + (1.0 / waves) * (1 - ramp)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if spec.attention_factor is not None:
        return frequencies, spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return frequencies, temperature(spec.mscale) / temperature(spec.mscale_all_dim)
    return frequencies, temperature(1.0)


def _factor(spec: RopeSpec) -> float:
    """Return the config's scaling factor, or the quotient of its two lengths."""
    return spec.max_positions / spec.original_positions if spec.factor is None else spec.factor


def _scaled_by(spec: RopeSpec, factors: tuple[float, ...]) -> torch.Tensor:
    """Return the frequencies, each divided by its factor."""
    return 1.0 / (torch.tensor(factors) * spec.theta ** _exponents(spec.rotary_dim))


def _longrope_scale(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    factor = _factor(spec)
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(spec.original_positions))
