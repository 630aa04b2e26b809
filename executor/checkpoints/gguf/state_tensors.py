"""Map the tensors of recurrent mixers in a GGUF file: Mamba 1 and 2, short convolutions, the gated delta rule."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quintet.executor.checkpoints.gguf.tensor_map import TensorMap
from quintet.executor.checkpoints.gguf.tensor_recipes import Finish, TensorRows, log_of_negative, permuted
from quintet.executor.model_config.spec import StateSpec
from quintet.executor.model_config.state_specs import DeltaSpec, Mamba2Spec, MambaSpec, ShortConvSpec


def add_state(found: TensorMap, spec: StateSpec, tiled: bool) -> None:
    """Add the recipes of one layer's mixer; ``tiled``: see `Architecture`."""
    match spec:
        case DeltaSpec():
            _add_delta(found, spec, tiled)
        case MambaSpec():
            _add_mamba(found, spec)
        case Mamba2Spec():
            _add_mamba2(found, spec)
        case ShortConvSpec():
            _add_convolution(found, "conv", "shortconv.conv", spec.channels, spec.taps)
            found.module(_ours(found, "in_proj"), "shortconv.in_proj")
            found.module(_ours(found, "out_proj"), "shortconv.out_proj")


def _add_mamba(found: TensorMap, spec: MambaSpec) -> None:
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


def _add_mamba2(found: TensorMap, spec: Mamba2Spec) -> None:
    found.module(_ours(found, "in_proj"), "ssm_in")
    found.module(_ours(found, "out_proj"), "ssm_out")
    _add_convolution(found, "conv1d", "ssm_conv1d", spec.conv_channels, spec.taps)
    found.whole(_ours(found, "dt_bias"), "ssm_dt.bias")
    found.whole(_ours(found, "A_log"), "ssm_a", log_of_negative, (spec.num_heads,))
    found.whole(_ours(found, "D"), "ssm_d", shape=(spec.num_heads,))
    if spec.norm is not None:
        found.whole(_ours(found, "norm.weight"), "ssm_norm.weight", shape=(spec.channels,))


def _add_delta(found: TensorMap, spec: DeltaSpec, tiled: bool) -> None:
    """Add a gated delta rule. Older Qwen3-Next files group queries, keys, values and gates by key head, like
    checkpoints."""
    keys, values, heads = spec.keys, spec.channels, spec.num_heads
    both, qkv, gates = (found.rows(f"{name}.weight") for name in ("ssm_in", "attn_qkv", "attn_gate"))
    wide, narrow = _grouped(spec, spec.head_dim, tiled), _grouped(spec, 1, tiled)
    if qkv is not None and gates is not None:
        of_values = qkv.between(2 * keys, 2 * keys + values).reordered(wide)
        found.stacked(_ours(found, "in_proj_qkv.weight"), (qkv.between(0, 2 * keys), of_values))
        found.stacked(_ours(found, "in_proj_z.weight"), (gates.reordered(wide),))
    elif both is not None:
        sizes = (spec.key_dim, spec.key_dim, values // spec.key_heads, values // spec.key_heads)
        q, k, v, z = _by_kind(both, spec.key_heads, sizes)
        found.stacked(_ours(found, "in_proj_qkv.weight"), (q, k, v))
        found.stacked(_ours(found, "in_proj_z.weight"), (z,))
    pairs = found.rows("ssm_ba.weight")
    if pairs is not None:
        each = heads // spec.key_heads
        betas, alphas = _by_kind(pairs, spec.key_heads, (each, each))
        found.stacked(_ours(found, "in_proj_b.weight"), (betas,))
        found.stacked(_ours(found, "in_proj_a.weight"), (alphas,))
    found.whole(_ours(found, "in_proj_b.weight"), "ssm_beta.weight", order=narrow)
    found.whole(_ours(found, "in_proj_a.weight"), "ssm_alpha.weight", order=narrow)
    channels = None if wide is None else np.concatenate([np.arange(2 * keys), 2 * keys + wide])
    _add_convolution(found, "conv1d", "ssm_conv1d", 2 * keys + values, spec.taps, channels)
    found.whole(_ours(found, "dt_bias"), "ssm_dt.bias", order=narrow)
    found.whole(_ours(found, "A_log"), "ssm_a", log_of_negative, (heads,), narrow)
    found.norm(_ours(found, "norm"), "ssm_norm", spec.norm)
    moved: Finish | None = None if wide is None else permuted(wide)
    found.whole(_ours(found, "out_proj.weight"), "ssm_out.weight", moved)


def _grouped(spec: DeltaSpec, width: int, tiled: bool) -> NDArray[np.int64] | None:
    """Return the rows of value heads grouped by key head; None: no reordering."""
    if not tiled or spec.num_heads == spec.key_heads:
        return None
    order = np.arange(spec.num_heads * width)
    return order.reshape(-1, spec.key_heads, width).swapaxes(0, 1).reshape(-1)


def _by_kind(rows: TensorRows, groups: int, sizes: tuple[int, ...]) -> list[TensorRows]:
    """Return the rows of each kind from groups that contain all kinds."""
    inside = np.arange(groups * sum(sizes)).reshape(groups, -1)
    ends = np.cumsum(sizes)
    return [rows.reordered(part.reshape(-1)) for part in np.split(inside, ends[:-1], axis=1)]


def _add_convolution(
    found: TensorMap, ours: str, theirs: str, channels: int, taps: int, order: NDArray[np.int64] | None = None
) -> None:
    found.whole(_ours(found, f"{ours}.weight"), f"{theirs}.weight", shape=(channels, 1, taps), order=order)
    found.whole(_ours(found, f"{ours}.bias"), f"{theirs}.bias")


def _ours(found: TensorMap, name: str) -> str:
    return f"{found.names.state_mixer}.{name}"
