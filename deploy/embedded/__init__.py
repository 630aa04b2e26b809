"""Models shipped with the package: a toy that completes Python, and its draft model, both trained by `make model`."""

from pathlib import Path

NAME = "quintet-toy"
"""Name of the default model in requests."""


def default_model_path() -> Path:
    """Return the folder of the default model."""
    return Path(__file__).resolve().parent / "default"


def draft_model_path() -> Path:
    """Return the folder of the draft model, which shares the default model's tokenizer."""
    return Path(__file__).resolve().parent / "draft"
