"""Text models of multimodal architectures: reads the config's ``text_config``; other parts' weights are not loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quintet.executor.model_config.families import llama, moe, post_norm, qwen_next
from quintet.executor.model_config.family import Family
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.spec import DecoderSpec

TIES = "tie_word_embeddings"


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
    tied = hf_config if hf_config.has(TIES) else text
    return HfConfig({**text.values, TIES: tied.values.get(TIES)}, text.path, text.inside)


def qwen2_vl(hf_config: HfConfig) -> DecoderSpec:
    """Qwen2-VL and 2.5-VL."""
    return llama.qwen2(_text_config(hf_config))


def mistral3(hf_config: HfConfig) -> DecoderSpec:
    """Mistral Small 3.1 and later; Ministral 3."""
    kind = hf_config.word("model_type", ("mistral", "ministral3"), "mistral")
    return llama.ministral3(hf_config) if kind == "ministral3" else llama.mistral(hf_config)


FAMILIES = {
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
