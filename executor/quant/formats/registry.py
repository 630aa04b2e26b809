"""``quant_method`` of a checkpoint's configuration to what recognises its format. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from quintet.executor.cards.card import ModelCard
from quintet.executor.quant.formats import awq, gptq, mxfp4
from quintet.executor.quant.formats.scheme import Format, Recognise
from quintet.executor.weights.header import Entry
from quintet.wire.errors import ConfigError

FORMATS: dict[str, Recognise] = {
    "gptq": gptq.recognise,
    "awq": awq.recognise,
    "mxfp4": mxfp4.recognise,
}
"""By ``quant_method``: what reads it off the card and its section of the card."""

REFUSED: dict[str, str] = {}
"""By ``quant_method``: why it does not load, and what does."""


def recognise(card: ModelCard) -> Format | None:
    """Return the format of a model's checkpoint; None where it is not quantized.

    Raises `ConfigError` of one line for a format, or a variant of one, that does not load, with what does.
    """
    for holder in (card, card.section("text_config")):
        if holder.has("quantization_config"):
            return _of(card, holder.section("quantization_config"))
    return None


def check_agrees(quantization: str, found: Format | None, path: str) -> None:
    """Raise `ConfigError` where ``--quantization`` asks for something else than the checkpoint is."""
    if found is None:
        if quantization in FORMATS:
            raise ConfigError(
                f"--quantization {quantization} is a format of checkpoints, and {path} has no quantization_config: give int8,"
                " int4 or w8a8 to quantize this one while it is loaded, or drop the flag"
            )
    elif quantization not in ("none", found.name) and not found.takes_quantization:
        raise ConfigError(
            f"--quantization {quantization}, but the checkpoint is quantized already ({found.words}; {path}): drop the flag, or"
            " take the checkpoint that it was made from"
        )


def check_contents(found: Format, contents: Mapping[str, Entry], path: str) -> None:
    """Raise `ConfigError` where no tensor of a checkpoint is quantized, though its configuration says that they are."""
    if contents and not any(name.endswith(found.mark) for name in contents):
        raise ConfigError(
            f"{path}: the weights are said to be quantized ({found.words}), and no tensor of the checkpoint ends with"
            f" {found.mark!r}: the configuration belongs to other weights"
        )


def _of(card: ModelCard, section: ModelCard) -> Format:
    method = section.values.get("quant_method", "unknown")
    if not isinstance(method, str):
        raise section.wrong("quant_method", "the name of a format")
    method = method.lower().replace("_", "-")
    if method in FORMATS:
        return FORMATS[method](card, section)
    near = difflib.get_close_matches(method, FORMATS, n=1)
    instead = REFUSED.get(
        method,
        f"{f'the nearest that loads is {near[0]!r}; ' if near else ''}these load: {', '.join(FORMATS)}",
    )
    raise ConfigError(
        f"{card.path}: the weights are quantized ({method!r:.40}), which is not supported: {instead}"
    )
