"""Choice of the model implementation: Quintet's layers, or transformers over Quintet's paged KV cache."""

from __future__ import annotations

from importlib.metadata import entry_points

from quintet.deploy.config.flags import Options
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES, nearest
from quintet.executor.model_config.rope import POSITIONS
from quintet.executor.model_config.shape import HEADS
from quintet.wire.config import DTYPE_BYTES, ModelImpl
from quintet.wire.errors import ConfigError


def choose_implementation(model_impl: str, architecture: str) -> ModelImpl:
    """Return the implementation of an architecture: the flag's, or Quintet's if it supports the architecture."""
    is_own = model_impl == "quintet" or (model_impl == "auto" and is_known(architecture))
    return "quintet" if is_own else "transformers"


def is_known(architecture: str) -> bool:
    """Return whether Quintet or an installed package implements the architecture."""
    return architecture in FAMILIES or bool(entry_points(group="quintet.models", name=architecture))


def note_of(model_impl: str, architecture: str) -> str | None:
    """Return a note that transformers was selected automatically, or None."""
    if model_impl != "auto" or is_known(architecture):
        return None
    return (
        f"{_introduced(architecture)}: using transformers with Quintet's paged KV cache, which is slower; --model-impl quintet"
        " rejects it instead"
    )


def _introduced(architecture: str) -> str:
    """Describe an architecture: supported by Quintet, or the nearest supported one."""
    if is_known(architecture):
        return f"Quintet implements {architecture}"
    near = nearest(architecture)
    like = f" (nearest supported architecture: {near})" if near else ""
    return f"Quintet does not implement {architecture}{like}"


def check_transformers_hf_config(hf_config: HfConfig, architecture: str) -> None:
    """Reject models that transformers cannot run with a paged KV cache, as far as ``config.json`` shows."""
    reason = None
    if hf_config.values.get("is_encoder_decoder") is True:
        reason = "encoder-decoder models are not supported"
    elif not hf_config.has(HEADS) and not hf_config.section("text_config").has(HEADS):
        reason = f"config.json has no {', '.join(HEADS)}, so the model has no KV heads"
    elif not hf_config.has(POSITIONS) and not hf_config.section("text_config").has(POSITIONS):
        reason = f"config.json has none of {', '.join(POSITIONS)}"
    elif hf_config.has("quantization_config") or hf_config.section("text_config").has("quantization_config"):
        reason = "quantized checkpoints require Quintet's implementation"
    if reason is not None:
        raise ConfigError(
            f"{hf_config.path}: {_introduced(architecture)}, and transformers cannot run it here: {reason}"
        )


def check_transformers_flags(options: Options) -> None:
    """Reject flags that require Quintet's implementation."""
    for flag, given, default in (
        ("--quantization", options.quantization, "none"),
        ("--activation-dtype", options.activation_dtype, "auto"),
        ("--packed-cache", options.packed_cache, None),
        ("--kv-cache-dtype", options.kv_cache_dtype, "auto"),
        ("--hf-overrides", options.hf_overrides, {}),
    ):
        if given not in (default, "model", *DTYPE_BYTES):
            raise ConfigError(
                f"{flag} {given} requires Quintet's implementation, but this model uses transformers: drop it, or choose a model"
                " for which `quintet plan` shows Quintet"
            )
