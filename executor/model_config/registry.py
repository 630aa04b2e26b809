"""Registry of supported architectures, by the name in a config.

`deploy` reads a config with this table before start-up; the executor builds the model with the same function. Imports
no torch. Each file of ``families/`` has related architectures. Of multimodal architectures, `text_of` reads the config's
``text_config``; other parts' weights are not loaded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace

from quintet.executor.model_config.families import (
    deepseek,
    falcon,
    gpt,
    hunyuan,
    hybrid,
    llama,
    mamba,
    moe,
    nemotron,
    post_norm,
    qwen_next,
    remote_code,
)
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.shape import Family
from quintet.executor.model_config.spec import DecoderSpec

_TIES = "tie_word_embeddings"


def text_of(read: Callable[[HfConfig], DecoderSpec], inner: str = "") -> Callable[[HfConfig], DecoderSpec]:
    """Return a reader of the ``text_config`` in a multimodal config.

    inner: prefix of the text model's names instead of ``model.``, if they are not all below ``language_model``.
    """

    def reader(hf_config: HfConfig) -> DecoderSpec:
        spec = read(_text_config(hf_config))
        names = replace(spec.names, prefix="language_model.")
        if inner:
            below = {
                field: getattr(names, field).replace("model.", inner, 1)
                for field in ("embedding", "layer", "final_norm")
            }
            names = replace(names, prefix=inner, **below)
        return replace(spec, names=names)

    return reader


def _text_config(hf_config: HfConfig) -> HfConfig:
    """Return the text model's config, with the ties of the whole model if they are stated.

    A text model that was saved alone under the whole model's name has its values at the top level.
    """
    if not hf_config.has("text_config"):
        return hf_config
    text = hf_config.section("text_config")
    tied = hf_config if hf_config.has(_TIES) else text
    return HfConfig({**text.values, _TIES: tied.values.get(_TIES)}, text.path, text.inside)


def qwen2_vl(hf_config: HfConfig) -> DecoderSpec:
    """Qwen2-VL and 2.5-VL."""
    return llama.qwen2(_text_config(hf_config))


def mistral3(hf_config: HfConfig) -> DecoderSpec:
    """Mistral Small 3.1 and later; Ministral 3."""
    kind = hf_config.word("model_type", ("mistral", "ministral3"), "mistral")
    return llama.ministral3(hf_config) if kind == "ministral3" else llama.mistral(hf_config)


FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **mamba.FAMILIES,
    **falcon.FAMILIES,
    **post_norm.FAMILIES,
    **gpt.FAMILIES,
    **deepseek.FAMILIES,
    **nemotron.FAMILIES,
    **hunyuan.FAMILIES,
    **hybrid.FAMILIES,
    **remote_code.FAMILIES,
    **qwen_next.FAMILIES,
    **moe.FAMILIES,
    "Qwen3_5ForConditionalGeneration": Family(
        text_of(qwen_next.qwen3_5, "model.language_model."), "Qwen 3.5, text part"
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        text_of(qwen_next.qwen3_5_moe, "model.language_model."), "Qwen 3.5 MoE, text part"
    ),
    "Gemma3ForConditionalGeneration": Family(text_of(post_norm.gemma3), "Gemma 3, text part"),
    "Qwen2VLForConditionalGeneration": Family(qwen2_vl, "Qwen2-VL, text part"),
    "Qwen2_5_VLForConditionalGeneration": Family(qwen2_vl, "Qwen2.5-VL, text part"),
    "Mistral3ForConditionalGeneration": Family(text_of(mistral3), "Mistral Small 3, Ministral 3: text part"),
    "Llama4ForConditionalGeneration": Family(text_of(moe.llama4), "Llama 4 Scout and Maverick, text part"),
}
"""Families by the config's architecture name."""

_VERSION = re.compile(r"[0-9]{1,3}(_[0-9]{1,2})?")
_ENDINGS = ("LMHeadModel", "Model")


_KINDS = {
    "refinedweb": "RWForCausalLM",
    "refinedwebmodel": "RWForCausalLM",
    "hunyuanv1dense": "HunYuanDenseV1ForCausalLM",
    "hunyuanv1moe": "HunYuanMoEV1ForCausalLM",
    "baichuan": "BaichuanForCausalLM",
    "chatglm": "ChatGLMModel",
}
"""Values of ``model_type`` that differ from the architecture's name in more than punctuation and case."""


def architecture_of(model_type: str, *, is_part: bool) -> str:
    """Return the architecture of a config that has only a ``model_type``: a known one, or the name by transformers' convention.

    is_part: whether the text model is a part of a multimodal model.
    """
    kind = re.sub(r"[-_ .]", "", model_type.lower()[:200])
    if kind in _KINDS:
        return _KINDS[kind]
    ending = "ForConditionalGeneration" if is_part else "ForCausalLM"
    names = sorted(FAMILIES, key=lambda name: not name.endswith(ending))
    for wanted in (kind, kind.removesuffix("text")):
        for name in names:
            if _lineage(name).replace("_", "") == wanted:
                return name
    return "".join(part.capitalize() for part in re.split(r"[-_ .]", model_type)) + ending


def nearest(architecture: str) -> str | None:
    """Return the known architecture with the most similar name, ignoring its task suffix; None if none is similar.

    Of names that differ only in their version, the nearest version wins.
    """
    names, lineage = {_lineage(name): name for name in reversed(FAMILIES)}, _lineage(architecture)
    near = difflib.get_close_matches(lineage, names, n=1, cutoff=0.6)
    if not near:
        return None
    versions = [each for each in names if _without_version(each) == _without_version(near[0])]
    return names[min(versions, key=lambda each: abs(_version(each) - _version(lineage)))]


def _lineage(architecture: str) -> str:
    """Return the part of a name that identifies the model lineage."""
    name, _, _ = architecture[:200].partition("For")
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name.lower().strip("_")


def _version(lineage: str) -> float:
    """Return the first number in a name, 3.5 for qwen3_5moe; 1 without a number."""
    found = _VERSION.search(lineage)
    return float(found[0].replace("_", ".")) if found else 1.0


def _without_version(lineage: str) -> str:
    return _VERSION.sub("", lineage, count=1)
