"""GGUF architectures that are not supported, by reason. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

_REASONS: Mapping[str, tuple[str, ...]] = {
    "it is an embedding or encoder model and generates no text": (
        *(
            "bert",
            "clip",
            "eurobert",
            "gemma-embedding",
            "jina-bert-v2",
            "jina-bert-v3",
            "llama-embed",
            "modern-bert",
        ),
        *("neo-bert", "nomic-bert", "nomic-bert-moe", "t5encoder", "wavtokenizer-dec"),
    ),
    "it is an encoder-decoder model": ("t5",),
    "it is a diffusion model, not an autoregressive one": (*("dream", "llada", "llada-moe", "rnd1"),),
    "its recurrent layers are not implemented": (
        *("arwkv7", "kimi-linear", "plamo2", "rwkv6", "rwkv6qwen2", "rwkv7"),
    ),
    "the family is not implemented; its checkpoint may run through transformers (docs/fallback.md)": (
        *(
            "afmoe",
            "arctic",
            "codeshell",
            "dbrx",
            "gemma3n",
            "gemma4",
            "glm-dsa",
            "grok",
            "grovemoe",
            "jais",
            "maincoder",
        ),
        *(
            "mimo2",
            "mistral4",
            "nemotron_h_moe",
            "openelm",
            "pangu-embedded",
            "plamo",
            "plamo3",
            "plm",
            "refact",
        ),
        *("smallthinker", "step35"),
    ),
    "it is a multimodal model": (*("chameleon", "cogvlm", "deepseek2-ocr", "hunyuan_vl", "paddleocr"),),
    "use the original checkpoint": ("gptj",),
}

REFUSED: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
"""Keyed by ``general.architecture``."""
