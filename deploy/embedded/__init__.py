"""The models that ship with the package: a toy that completes Python, and its draft, both trained by `make model`."""

from pathlib import Path

NAME = "quintet-toy"
"""What clients call the default model."""


def default_model_path() -> Path:
    """Return the folder of the model that is served when none is named."""
    return Path(__file__).resolve().parent / "default"


def draft_model_path() -> Path:
    """Return the folder of the draft model, which shares the default model's tokenizer."""
    return Path(__file__).resolve().parent / "draft"
