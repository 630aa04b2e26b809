"""Where a GGUF file has what mixers with a state expect: Mamba 1 and 2, short convolutions."""

from __future__ import annotations

from quintet.executor.cards.spec import StateSpec
from quintet.executor.cards.state_specs import Mamba2Spec, MambaSpec, ShortConvSpec
from quintet.executor.gguf.found import Found
from quintet.executor.gguf.recipes import log_of_negative


def add_state(found: Found, spec: StateSpec) -> None:
    """Say how the tensors of one layer's mixer are made."""
    match spec:
        case MambaSpec():
            _add_mamba(found, spec)
        case Mamba2Spec():
            _add_mamba2(found, spec)
        case ShortConvSpec():
            _add_convolution(found, "conv", "shortconv.conv", spec.channels, spec.taps)
            found.module(_ours(found, "in_proj"), "shortconv.in_proj")
            found.module(_ours(found, "out_proj"), "shortconv.out_proj")


def _add_mamba(found: Found, spec: MambaSpec) -> None:
    for ours, theirs in (
        ("in_proj", "ssm_in"),
        ("x_proj", "ssm_x"),
        ("dt_proj", "ssm_dt"),
        ("out_proj", "ssm_out"),
    ):
        found.module(_ours(found, ours), theirs)
    _add_convolution(found, "conv1d", "ssm_conv1d", spec.channels, spec.taps)
    found.whole(_ours(found, "A_log"), "ssm_a", log_of_negative)
    found.whole(_ours(found, "D"), "ssm_d")
    for part in ("dt", "b", "c"):
        found.norm(_ours(found, f"{part}_layernorm"), f"ssm_{part}_norm", spec.inner_norm)


def _add_mamba2(found: Found, spec: Mamba2Spec) -> None:
    found.module(_ours(found, "in_proj"), "ssm_in")
    found.module(_ours(found, "out_proj"), "ssm_out")
    _add_convolution(found, "conv1d", "ssm_conv1d", spec.conv_channels, spec.taps)
    found.whole(_ours(found, "dt_bias"), "ssm_dt.bias")
    found.whole(_ours(found, "A_log"), "ssm_a", log_of_negative, (spec.num_heads,))
    found.whole(_ours(found, "D"), "ssm_d", shape=(spec.num_heads,))
    found.whole(_ours(found, "norm.weight"), "ssm_norm.weight", shape=(spec.channels,))


def _add_convolution(found: Found, ours: str, theirs: str, channels: int, taps: int) -> None:
    found.whole(_ours(found, f"{ours}.weight"), f"{theirs}.weight", shape=(channels, 1, taps))
    found.whole(_ours(found, f"{ours}.bias"), f"{theirs}.bias")


def _ours(found: Found, name: str) -> str:
    return f"{found.names.state_mixer}.{name}"
