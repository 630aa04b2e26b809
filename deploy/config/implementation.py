"""Who computes a model: Quintet's own layers, or transformers over our KV memory; and what that rules out."""

from __future__ import annotations

from importlib.metadata import entry_points

from quintet.deploy.config.flags import Options
from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.families.shape import HEADS
from quintet.executor.model_config.registry import FAMILIES, nearest
from quintet.executor.model_config.rope import POSITIONS
from quintet.wire.config import ModelImpl
from quintet.wire.errors import ConfigError


def choose_implementation(asked: str, architecture: str) -> ModelImpl:
    """Return who computes an architecture: as ``--model-impl`` says, or whoever knows it."""
    if asked == "transformers":
        return "transformers"
    if asked == "quintet" or is_known(architecture):
        return "quintet"
    return "transformers"


def is_known(architecture: str) -> bool:
    """Whether we, or an installed package, have layers for it."""
    return architecture in FAMILIES or bool(entry_points(group="quintet.models", name=architecture))


def note_of(asked: str, architecture: str) -> str | None:
    """Return the line that says that transformers computes a model although nobody asked for it."""
    if asked != "auto" or is_known(architecture):
        return None
    return (
        f"{_introduced(architecture)}: transformers computes it, over Quintet's KV memory, more slowly; --model-impl quintet"
        " refuses that"
    )


def _introduced(architecture: str) -> str:
    """Say of an architecture whether it is ours, and which is most like it if not."""
    if is_known(architecture):
        return f"{architecture} is one of Quintet's own models"
    near = nearest(architecture)
    like = f" (the nearest that is: {near})" if near else ""
    return f"{architecture} is none of Quintet's own models{like}"


def check_transformers_card(card: ModelCard, architecture: str) -> None:
    """Reject what transformers could run, but not over paged KV memory, as far as its card tells."""
    why = None
    if card.values.get("is_encoder_decoder") is True:
        why = "it is an encoder and a decoder, and only decoders are served"
    elif not card.has(HEADS) and not card.section("text_config").has(HEADS):
        why = (
            f"its card has no {', '.join(HEADS)}: what it keeps of the past are not keys and values of heads"
        )
    elif not card.has(POSITIONS) and not card.section("text_config").has(POSITIONS):
        why = f"its card has none of {', '.join(POSITIONS)}"
    elif card.has("quantization_config") or card.section("text_config").has("quantization_config"):
        why = "its checkpoint is quantized, and what is quantized is read into Quintet's own layers alone"
    if why is not None:
        raise ConfigError(
            f"{card.path}: {_introduced(architecture)}, and cannot run through transformers: {why}"
        )


def check_transformers_flags(options: Options) -> None:
    """Reject what our own layers alone can do."""
    for flag, given, usual in (
        ("--quantization", options.quantization, "none"),
        ("--activation-dtype", options.activation_dtype, "auto"),
        ("--packed-cache", options.packed_cache, None),
        ("--kv-cache-dtype", options.kv_cache_dtype, "auto"),
        ("--hf-overrides", options.hf_overrides, {}),
    ):
        if given not in (usual, "model"):
            raise ConfigError(
                f"{flag} {given} is for Quintet's own models, and transformers computes this one: drop it, or take a model that"
                " `quintet plan` says is computed by Quintet"
            )
