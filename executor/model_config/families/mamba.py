"""Models without attention: Mamba, FalconMamba and Mamba 2."""

from __future__ import annotations

from typing import Any

from quintet.executor.model_config.hf_config import HfConfig, Key
from quintet.executor.model_config.names import Names
from quintet.executor.model_config.shape import (
    LAYER_EPS,
    MAX_WIDTH,
    Family,
    decoder,
    hidden_size,
)
from quintet.executor.model_config.spec import DecoderSpec, LayerSpec, NormKind, Norms, NormSpec
from quintet.executor.model_config.state_specs import Mamba2Spec, MambaSpec
from quintet.wire.errors import ConfigError

MAX_STATE_SIZE = 256
MAX_TAPS = 16
"""Limits of the kernels: ``csrc/cpu/ops/states.hpp``."""
MAX_TIME_STEP = 3e38
"""Largest bound of time steps: kernels use fp32."""
REACH = 1 << 17
"""Context length of models without positions: states have no limit, token tables do."""

MAMBA_NAMES = Names(
    prefix="backbone.",
    embedding="backbone.embeddings",
    layer="backbone.layers.{layer}",
    final_norm="backbone.norm_f",
    mixer_norm="norm",
    state_mixer="mixer",
)


def norm(hf_config: HfConfig) -> NormSpec:
    """Return the norm before each mixer: an RMS norm, although configs call it a layer norm."""
    return NormSpec(kind=NormKind.RMS, eps=hf_config.real(LAYER_EPS, 1e-12, 1.0, 1e-5))


def state_size(hf_config: HfConfig, key: Key, default: int) -> int:
    """Return the state elements per channel."""
    return hf_config.whole(key, 1, MAX_STATE_SIZE, default)


def taps(hf_config: HfConfig, key: Key, default: int = 4) -> int:
    """Return the kernel width of the convolution."""
    return hf_config.whole(key, 2, MAX_TAPS, default)


def check_silu(hf_config: HfConfig) -> None:
    """Reject activations of convolution and gate other than SiLU."""
    hf_config.word("hidden_act", ("silu", "swish"), "silu")


def expanded(hf_config: HfConfig, key: Key = "expand") -> int:
    """Return the number of channels."""
    channels = int(hf_config.real(key, 0.1, 64.0, 2.0) * hidden_size(hf_config))
    if not 1 <= channels <= MAX_WIDTH:
        raise hf_config.wrong(key, f"a factor that gives 1 to {MAX_WIDTH} channels")
    return channels


def dt_rank(hf_config: HfConfig, key: str) -> int:
    """Return the rank of the time-step projection; ``auto`` means 1/16 of the hidden size."""
    usual = -(-hidden_size(hf_config) // 16)
    return usual if hf_config.values.get(key) == "auto" else hf_config.whole(key, 1, MAX_WIDTH, usual)


def dt_limits(hf_config: HfConfig) -> tuple[float, float]:
    """Return the limits of time steps. JSON has no infinity, so configs write ``Infinity`` or an object."""
    value = hf_config.values.get("time_step_limit")
    if value is None:
        return 0.0, float("inf")
    if isinstance(value, list) and len(value) == 2:
        least, most = (float("inf") if isinstance(each, dict) else each for each in value)
        if all(isinstance(each, int | float) for each in (least, most)) and 0 <= least <= min(
            most, MAX_TIME_STEP
        ):
            return float(least), float(most) if most <= MAX_TIME_STEP else float("inf")
    raise hf_config.wrong(
        "time_step_limit", f"two numbers, the smaller one first and at most {MAX_TIME_STEP:g}"
    )


def _layers(hf_config: HfConfig, mixer: MambaSpec | Mamba2Spec, **switches: Any) -> DecoderSpec:
    layer = LayerSpec(mixer=mixer, mixer_norms=Norms(before=norm(hf_config)))
    usual: dict[str, Any] = {"names": MAMBA_NAMES, "reach": REACH}
    return decoder(hf_config, layer, norm(hf_config), **(usual | switches))


def _mamba(hf_config: HfConfig, inner_norm: NormSpec | None) -> DecoderSpec:
    check_silu(hf_config)
    mixer = MambaSpec(
        channels=hf_config.whole("intermediate_size", 1, MAX_WIDTH, expanded(hf_config)),
        state_size=state_size(hf_config, "state_size", 16),
        dt_rank=dt_rank(hf_config, "time_step_rank"),
        taps=taps(hf_config, "conv_kernel"),
        conv_bias=hf_config.flag("use_conv_bias", True),
        projection_bias=hf_config.flag("use_bias", False),
        inner_norm=inner_norm,
    )
    return _layers(hf_config, mixer, usually_tied=True)


def mamba(hf_config: HfConfig) -> DecoderSpec:
    """Mamba 1."""
    return _mamba(hf_config, None)


def falcon_mamba(hf_config: HfConfig) -> DecoderSpec:
    """FalconMamba: time steps, inputs and outputs of the state are normed without weights."""
    eps = hf_config.real("mixer_rms_eps", 1e-12, 1.0, 1e-6)
    return _mamba(hf_config, NormSpec(kind=NormKind.RMS, eps=eps, weighted=False))


def mamba2(hf_config: HfConfig) -> DecoderSpec:
    """Mamba 2."""
    check_silu(hf_config)
    biased = hf_config.flag("use_bias", False)
    mixer = heads(
        hf_config,
        norm(hf_config),
        hf_config.whole("num_heads", 1, MAX_WIDTH, 128),
        "head_dim",
        expanded(hf_config),
    )
    spec = Mamba2Spec(
        **mixer,
        groups=groups(hf_config, "n_groups", 8, mixer["num_heads"]),
        state_size=state_size(hf_config, "state_size", 128),
        taps=taps(hf_config, "conv_kernel"),
        conv_bias=hf_config.flag("use_conv_bias", True),
        projection_bias=biased,
        output_bias=biased,
    )
    return _layers(hf_config, spec)


def groups(hf_config: HfConfig, key: str, default: int, num_heads: int) -> int:
    """Return the number of head groups that share inputs and outputs of the state."""
    count = hf_config.whole(key, 1, num_heads, min(default, num_heads))
    if num_heads % count:
        raise hf_config.wrong(key, f"a divisor of the number of heads, {num_heads}")
    return count


def heads(hf_config: HfConfig, norm: NormSpec | None, count: int, key: str, channels: int) -> dict[str, Any]:
    """Return Mamba 2's head settings. Raises `ConfigError` unless the heads make up all channels."""
    dim = (
        channels // count
        if hf_config.values.get(key, "auto") == "auto"
        else hf_config.whole(key, 1, MAX_WIDTH)
    )
    if dim * count != channels:
        raise ConfigError(
            f"{hf_config.path}: {count} heads of {dim} channels ({key}) are {count * dim} channels, but the model has"
            f" {channels}"
        )
    return {"num_heads": count, "head_dim": dim, "norm": norm, "dt_limits": dt_limits(hf_config)}


FAMILIES = {
    "MambaForCausalLM": Family(mamba, "Mamba 1"),
    "FalconMambaForCausalLM": Family(falcon_mamba, "Falcon Mamba 7B"),
    "Mamba2ForCausalLM": Family(mamba2, "Mamba 2, Codestral Mamba"),
}
