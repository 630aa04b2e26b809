"""Registry from ``quant_method`` of a checkpoint's configuration to formats. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from quintet.executor.checkpoints.gguf.types import BY_NAME
from quintet.executor.checkpoints.quant.formats import (
    autoround,
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    hqq,
    modelopt,
    quark,
    squeezellm,
    torchao,
)
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.weights.header import Entry
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError


def gguf_of(types: Sequence[str]) -> Format:
    """Return the format of a file with these types; `quintet.executor.checkpoints.quant.gguf` makes the layers."""
    words = f"gguf: {', '.join(types)}"
    return Format("gguf", words, "", lambda layer: None, memory_bytes=_gguf_bytes, takes_quantization=True)


def _gguf_bytes(contents: Mapping[str, Entry], dtype_bytes: int) -> int:
    return sum(
        BY_NAME[entry.dtype].num_packed_bytes(entry.num_bytes, dtype_bytes) for entry in contents.values()
    )


def _gguf(section: HfConfig) -> Format:
    """Return the format of a config that was made from a GGUF file."""
    types = section.values.get("types")
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        raise section.wrong("types", "the types of the file's tensors: serve the .gguf file itself")
    return gguf_of(types)


def _mxfp4(section: HfConfig) -> Format:
    """Return the format of gpt-oss's experts: MXFP4 (Open Compute Project, "OCP Microscaling Formats (MX) Specification",
    2023); all other layers are unquantized.

    The experts' layout locates the tensors (`quintet.executor.models.sublayers.experts`):

        …_blocks  uint8 [experts, rows, depth / 32, 16]   two codes in a byte, the first in the low bits
        …_scales  uint8 [experts, rows, depth / 32]       exponents of powers of two
    """
    words = "mxfp4: experts of 4 bits in groups of 32"
    return Format("mxfp4", words, "_blocks", lambda layer: None, takes_quantization=True)


FORMATS: dict[str, Callable[[HfConfig], Format]] = {
    "gptq": gptq.recognise,
    "awq": awq.recognise,
    "compressed-tensors": compressed_tensors.recognise,
    "fp8": fp8.recognise,
    "fbgemm_fp8": fp8.recognise_fbgemm,
    "gguf": _gguf,
    "mxfp4": _mxfp4,
    "bitsandbytes": bitsandbytes.recognise,
    "modelopt": modelopt.recognise,
    "quark": quark.recognise,
    "auto-round": autoround.recognise,
    "hqq": hqq.recognise,
    "squeezellm": squeezellm.recognise,
    "torchao": torchao.recognise,
    "bitnet": bitnet.recognise,
}
"""Readers of the quantization section of a config by its ``quant_method``. They raise `ConfigError` for an unsupported
variant."""

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

_AGAIN = "quantize the original checkpoint with"
REFUSED = {
    "smoothquant": "fold the factors into the weights and save as compressed-tensors (LLM Compressor)",
    "aqlm": f"vector codebooks are not supported; {_AGAIN} 2-bit GPTQ",
    "vptq": f"vector codebooks are not supported; {_AGAIN} 2-bit GPTQ",
    "quip": f"vector codebooks are not supported; {_AGAIN} 2-bit GPTQ",
    "eetq": f"its layout is specific to one GPU's kernels; {_AGAIN} compressed-tensors, or set --quantization int8",
    "mlx": "its layout is for Apple's framework; use a GGUF file, or the original checkpoint with --quantization int4",
    "spqr": f"sparse outliers are not supported; {_AGAIN} GPTQ",
    "higgs": f"vector codebooks are not supported; {_AGAIN} GPTQ",
}
"""Unsupported values of ``quant_method``, with reason and alternative."""


def recognise(hf_config: HfConfig) -> Format | None:
    """Return the format of a model's checkpoint; None if it is not quantized.

    Raises `ConfigError` for an unsupported format or variant, with an alternative.
    """
    for holder in (hf_config, hf_config.section("text_config")):
        section = holder.section("quantization_config")
        if section.values:
            return _of(hf_config, section)
    return None


def check_agrees(quantization: str, found: Format | None, path: str) -> None:
    """Raise `ConfigError` if ``--quantization`` contradicts the checkpoint's format."""
    if found is None:
        if quantization in FORMATS:
            raise ConfigError(
                f"--quantization {quantization} is a checkpoint format, but {path} has no quantization_config: set int8,"
                " int4 or w8a8 to quantize while loading, or drop the flag"
            )
    elif quantization not in ("none", found.name) and (
        quantization in FORMATS or not found.takes_quantization
    ):
        raise ConfigError(
            f"--quantization {quantization}, but the checkpoint is already quantized ({found.words}; {path}): drop the flag, or"
            " use the original checkpoint"
        )


def check_contents(found: Format, contents: Mapping[str, Entry], path: str) -> None:
    """Raise `ConfigError` if the configuration declares quantized weights but no checkpoint tensor is quantized."""
    if contents and not any(found.mark in name for name in contents):
        raise ConfigError(
            f"{path}: the configuration declares quantized weights ({found.words}), but no tensor name contains"
            f" {found.mark!r}: use the configuration that belongs to these weights"
        )


def _unnamed(section: HfConfig) -> str:
    """Return the method of a section without ``quant_method``: of old versions of transformers, or of MLX."""
    if any(section.values.get(f"load_in_{bits}bit") is True for bits in (4, 8)):
        return "bitsandbytes"
    return "mlx" if {"bits", "group_size"} <= section.values.keys() else "unknown"


def _of(hf_config: HfConfig, section: HfConfig) -> Format:
    method = section.values.get("quant_method", _unnamed(section))
    if not isinstance(method, str):
        raise section.wrong("quant_method", "the name of a format")
    method = _SPELLINGS.get(method.lower(), method.lower())
    if method == "mxfp4" and "GptOssForCausalLM" not in (hf_config.values.get("architectures") or ()):
        raise ConfigError(
            f"{hf_config.path}: quant_method 'mxfp4' is supported only for gpt-oss's experts: use the"
            " original checkpoint"
        )
    if method in FORMATS:
        return FORMATS[method](section)
    near = difflib.get_close_matches(method, FORMATS, n=1)
    instead = REFUSED.get(
        method,
        f"{f'the nearest supported format is {near[0]!r}; ' if near else ''}supported: {', '.join(FORMATS)}",
    )
    raise ConfigError(f"{hf_config.path}: unsupported quant_method {method!r:.40}: {instead}")
