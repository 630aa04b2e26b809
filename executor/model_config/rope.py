"""Read the settings of rotary position embedding (RoPE) from a config.

`quintet.executor.models.layers.rope` computes the rotation. Imports no torch: `deploy` derives the context length
from these settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quintet.executor.model_config.hf_config import HfConfig, Key

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "factors")
"""RoPE types of configs. `RopeSpec` has one more, ``stairs``, for Qwen 1."""
_ALIASES = {"su": "longrope", "mrope": "default"}
"""Older names of types; multimodal positions equal plain positions for text."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")
"""Keys of the maximum context length."""
THETA = ("rope_theta", "rotary_emb_base")
SHARE = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent")
MAX_POSITIONS = 1 << 24
"""Limit on the context length: slot tables have one entry per position."""
_MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """RoPE settings of one model with defaults filled in; settings of other types are None."""

    kind: str
    theta: float
    rotary_dim: int
    """Number of rotated elements of a head, from the first; even."""
    max_positions: int
    """The config's ``max_position_embeddings``."""
    original_positions: int
    """Context length of pretraining, for types that extend it."""
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    """[rotary_dim / 2], as ``long_factor``. Type ``factors`` uses it for all lengths."""
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """True if a token's rotation depends on the sequence length."""
        return self.kind in {"dynamic", "longrope", "stairs"}

    @property
    def fixed_len(self) -> int | None:
        """Sequence length up to which all rotations are the same; longer sequences have others. None: always the same."""
        if not self.depends_on_length:
            return None
        return (
            min(self.original_positions, self.max_positions)
            if self.kind == "dynamic"
            else self.original_positions
        )

    @property
    def reach(self) -> int:
        """The maximum context length that the position encoding supports, scaling included.

        The configs of llama3 and longrope include scaling in ``max_position_embeddings``; the other types multiply it,
        except in Gemma 3.
        """
        if self.kind in {"linear", "dynamic"}:
            assert self.factor is not None
            return int(self.max_positions * self.factor)
        if self.kind == "yarn" and self.factor is not None:
            return max(self.max_positions, int(self.original_positions * self.factor))
        return self.max_positions


def rope_spec(
    hf_config: HfConfig,
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10000.0,
    share: float = 1.0,
    rotary_dim: int | None = None,
    layer_type: str | None = None,
    theta_key: Key = THETA,
    scaled: bool = True,
) -> RopeSpec:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (older configs).

    ``max_positions``, ``theta``, ``share`` (rotated fraction of a head): defaults of the family. ``rotary_dim``: for
    families that count rotated elements instead. ``layer_type``: the rotation to read from a config with one per layer
    type. For older configs, ``theta_key`` and ``scaled`` (whether scaling applies) select it. Raises `ConfigError` with
    the value, what was found and what is allowed.
    """
    max_positions = hf_config.whole(POSITIONS, 1, MAX_POSITIONS, max_positions)
    parameters = _parameters(hf_config, layer_type, scaled)
    kind = _kind(parameters)

    def either(key: Key) -> HfConfig:
        return parameters if parameters.has(key) else hf_config

    original = hf_config if hf_config.has("original_max_position_embeddings") else parameters
    least, most = 1.0 + 1e-6, 1e15
    least_original = 2 if kind == "longrope" else 1
    spec = RopeSpec(
        kind=kind,
        theta=parameters.real(THETA, least, most)
        if parameters.has(THETA)
        else hf_config.real(theta_key, least, most, theta),
        rotary_dim=rotary_dim or _rotary_dim(either(SHARE), head_dim, share),
        max_positions=max_positions,
        original_positions=original.whole(
            "original_max_position_embeddings", least_original, MAX_POSITIONS, max_positions
        ),
    )
    spec = _with_scaling(spec, parameters)
    if spec.reach > MAX_POSITIONS:
        raise parameters.wrong(
            "factor", f"a factor that gives a context of at most {MAX_POSITIONS}, not {spec.reach}"
        )
    return spec


def _parameters(hf_config: HfConfig, layer_type: str | None, scaled: bool) -> HfConfig:
    """Return the settings of the rotation, or of one layer type's rotation in a config with several."""
    new = hf_config.section("rope_parameters")
    parameters = new if new.values else hf_config.section("rope_scaling")
    if layer_type is not None and isinstance(parameters.values.get(layer_type), dict):
        return parameters.section(layer_type)
    for key, value in parameters.values.items():
        if isinstance(value, dict):
            raise parameters.wrong(
                key, "one setting for all layers: this family does not support a rotation per layer type"
            )
    return parameters if scaled or new.values else HfConfig({}, hf_config.path)


def _with_scaling(spec: RopeSpec, parameters: HfConfig) -> RopeSpec:
    """Return ``spec`` with the settings of its type."""

    def optional(key: str, least: float) -> float | None:
        return parameters.real(key, least, _MAX_FACTOR) if parameters.has(key) else None

    if spec.kind in {"linear", "dynamic"}:
        if spec.kind == "dynamic" and spec.rotary_dim < 4:
            raise parameters.wrong(
                "rope_type",
                f"another type: dynamic needs at least 4 rotated elements, but there are {spec.rotary_dim}",
            )
        return replace(spec, factor=parameters.real("factor", 1.0, _MAX_FACTOR))
    if spec.kind == "llama3":
        low = parameters.real("low_freq_factor", 1e-6, _MAX_FACTOR)
        high = parameters.real("high_freq_factor", 1e-6, _MAX_FACTOR)
        if high <= low:
            raise parameters.wrong("high_freq_factor", f"above low_freq_factor, {low:g}")
        factor = parameters.real("factor", 1.0, _MAX_FACTOR)
        return replace(spec, factor=factor, low_freq_factor=low, high_freq_factor=high)
    if spec.kind == "yarn":
        fast = parameters.real("beta_fast", 1e-6, _MAX_FACTOR, 32.0)
        slow = parameters.real("beta_slow", 1e-6, _MAX_FACTOR, 1.0)
        if fast < slow:
            raise parameters.wrong("beta_fast", f"at least beta_slow, {slow:g}")
        return replace(
            spec,
            factor=optional("factor", 1.0),
            beta_fast=fast,
            beta_slow=slow,
            truncate=parameters.flag("truncate", True),
            attention_factor=optional("attention_factor", 1e-6),
            mscale=parameters.real("mscale", 0.0, _MAX_FACTOR, 0.0),
            mscale_all_dim=parameters.real("mscale_all_dim", 0.0, _MAX_FACTOR, 0.0),
        )

    def by_pair(key: str) -> tuple[float, ...]:
        pairs = spec.rotary_dim // 2
        return parameters.reals(key, pairs, 1e-6, _MAX_FACTOR, "pair of rotated dimensions")

    if spec.kind == "factors":
        return replace(spec, short_factor=by_pair("factors"))
    if spec.kind == "longrope":
        return replace(
            spec,
            factor=optional("factor", 1.0),
            attention_factor=optional("attention_factor", 1e-6),
            short_factor=by_pair("short_factor"),
            long_factor=by_pair("long_factor"),
        )
    return spec


def _kind(parameters: HfConfig) -> str:
    key = "rope_type" if parameters.has("rope_type") else "type"
    kind = parameters.word(key, (*KINDS, *_ALIASES), "default")
    if kind == "yarn" and parameters.has("short_factor"):
        return "longrope"  # used by the first configs of Phi 3
    return _ALIASES.get(kind, kind)


def _rotary_dim(hf_config: HfConfig, head_dim: int, share: float) -> int:
    share = hf_config.real(SHARE, 0.0, 1.0, share)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise hf_config.wrong(
            SHARE,
            f"a fraction that rotates an even number of a head's {head_dim} elements, at least 2; {share:g} rotates {rotary_dim}",
        )
    return rotary_dim
