"""``quant_method`` of a checkpoint's configuration to what recognises its format. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from quintet.executor.checkpoints.quant.formats import (
    autoround,
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    hqq,
    modelopt,
    mxfp4,
    quark,
    squeezellm,
    torchao,
)
from quintet.executor.checkpoints.quant.formats.scheme import Format, Recognise
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.card import ModelCard
from quintet.wire.errors import ConfigError

FORMATS: dict[str, Recognise] = {
    "gptq": gptq.recognise,
    "awq": awq.recognise,
    "compressed-tensors": compressed_tensors.recognise,
    "fp8": fp8.recognise,
    "fbgemm_fp8": fp8.recognise_fbgemm,
    "gguf": gguf.recognise,
    "mxfp4": mxfp4.recognise,
    "bitsandbytes": bitsandbytes.recognise,
    "modelopt": modelopt.recognise,
    "quark": quark.recognise,
    "auto-round": autoround.recognise,
    "hqq": hqq.recognise,
    "squeezellm": squeezellm.recognise,
    "torchao": torchao.recognise,
    "bitnet": bitnet.recognise,
}
"""By ``quant_method``: what reads it off the card and its section of the card."""

_SPELLINGS = {
    "compressed_tensors": "compressed-tensors",
    "sparseml": "compressed-tensors",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
    "gptqmodel": "gptq",
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
}
"""Other names of the same methods."""

_AGAIN = "take the checkpoint that it was made from, and quantize that with"
REFUSED = {
    "smoothquant": "fold its factors into the weights and save them as compressed-tensors, as LLM Compressor does",
    "aqlm": f"its codebooks are of vectors; {_AGAIN} GPTQ of 2 bits",
    "vptq": f"its codebooks are of vectors; {_AGAIN} GPTQ of 2 bits",
    "quip": f"its codebooks are of vectors; {_AGAIN} GPTQ of 2 bits",
    "eetq": f"its bytes are shuffled for one GPU's kernels; {_AGAIN} compressed-tensors, or give --quantization int8",
    "spqr": f"its outliers are stored sparsely; {_AGAIN} GPTQ",
    "higgs": f"its codebooks are of vectors; {_AGAIN} GPTQ",
}
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
    elif quantization not in ("none", found.name) and (
        quantization in FORMATS or not found.takes_quantization
    ):
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
    method = _SPELLINGS.get(method.lower(), method.lower())
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
