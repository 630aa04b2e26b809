"""A GGUF file on a device, with weights in codes: tokens of the dequantized model, and the same bits in every batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.emulated import EmulatedDevice
from tests.cuda.test_coded_models import agree
from tests.gguf.random_blocks import in_blocks
from tests.gguf.test_packed import WIDE, as_q4_k_m
from tests.models.equality import load
from tests.models.random_checkpoints import of_transformers, write_checkpoint


@pytest.mark.whole
def test_a_file_of_mixed_types_has_the_tokens_of_the_dequantized_model(tmp_path: Path) -> None:
    row = in_blocks(of_transformers("Qwen2Config", **WIDE), as_q4_k_m, tmp_path / "model.gguf")
    write_checkpoint(row, tmp_path / "plain")
    agree(tmp_path / "model.gguf", load(tmp_path / "plain"), EmulatedDevice())
