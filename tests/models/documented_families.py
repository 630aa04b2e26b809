"""The table of families in docs/models.md: ``python -m tests.models.documented_families`` writes it from the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quintet.executor.model_config.describe import describe
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import DecoderSpec

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- families end -->\n"

SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
}
"""Required keys of a config; all others have the family's defaults."""
MORE: dict[str, dict[str, Any]] = {
    "BaichuanForCausalLM": {"max_position_embeddings": None, "model_max_length": 4096},
    "GPTNeoForCausalLM": {"attention_layers": ["global", "local"] * 6},
    "Gemma3ForConditionalGeneration": {"text_config": SIZES},
    "MambaForCausalLM": {"intermediate_size": 2048},
    "FalconMambaForCausalLM": {"intermediate_size": 2048},
    "BambaForCausalLM": {"attn_layer_indices": [4, 9]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba"] * 8 + ["attention"] * 4},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-M*" * 3},
    "Lfm2ForCausalLM": {"full_attn_idxs": [4, 9]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv"] * 8 + ["full_attention"] * 4},
    "Mistral3ForConditionalGeneration": {"text_config": SIZES},
    "Qwen3_5ForConditionalGeneration": {"text_config": SIZES},
    "Qwen3_5MoeForConditionalGeneration": {"text_config": SIZES},
    "Llama4ForConditionalGeneration": {"text_config": SIZES},
}
"""Additional required keys, by architecture."""


def hf_config_of(architecture: str) -> HfConfig:
    """Return a minimal config of the architecture."""
    return HfConfig(SIZES | MORE.get(architecture, {}), "config.json")


def table() -> str:
    """Return the table in Markdown: architectures without differences share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    columns: list[str] = []
    for architecture, family in FAMILIES.items():
        spec = family.read(hf_config_of(architecture))
        described = describe(spec) if isinstance(spec, DecoderSpec) else {}
        columns = columns or list(described)
        rows.setdefault((family.words, *described.values()), []).append(architecture)
    head = ["models", "architecture", *columns]
    lines = [head, ["---"] * len(head)]
    lines += [
        [words, ", ".join(f"`{name}`" for name in names), *cells] for (words, *cells), names in rows.items()
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write the document."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, behind = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}{table()}{END}{behind}")


if __name__ == "__main__":
    main()
