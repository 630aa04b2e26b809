"""Architectures that GGUF has a name for and that are not read, by why. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

_REASONS: Mapping[str, tuple[str, ...]] = {
    "it embeds texts, images or sound and writes nothing": (
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
    "it reads with one stack of layers and writes with another": ("t5",),
    "it fills in all places of an answer in turns, rather than one after the other": (
        *("dream", "llada", "llada-moe", "rnd1"),
    ),
    "its layers keep a state that none of ours keeps": (
        *("arwkv7", "kimi-linear", "plamo2", "rwkv6", "rwkv6qwen2", "rwkv7"),
    ),
    "it is no family that Quintet computes itself; its checkpoint may run through transformers (docs/fallback.md)": (
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
    "images are part of what it reads, and its text alone is another model": (
        *("chameleon", "cogvlm", "deepseek2-ocr", "hunyuan_vl", "paddleocr"),
    ),
    "no program computes files of it: take the checkpoint": ("gptj",),
}

REFUSED: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
"""By ``general.architecture``."""
