"""Checkpoints of base classes of transformers, without an output layer, as publishers of embedding models save them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.models.equality import load
from tests.models.pooling.test_vectors import CLOSE, alone, reference
from tests.models.random_checkpoints import SMALL, randomise
from tests.models.small_models import prompts_of


@pytest.mark.drawn(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Mistral", "Qwen3"])
def test_vectors_equal_those_of_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**SMALL, head_dim=16, tie_word_embeddings=tied)
    model = getattr(transformers, f"{kind}Model")(config)
    randomise(model)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert json.loads((tmp_path / "config.json").read_bytes())["architectures"] == [f"{kind}Model"]
    loaded, prompts = load(tmp_path, runner="pooling"), prompts_of()
    expected = reference(tmp_path, prompts)
    for key, vector in alone(loaded, prompts).items():
        apart = torch.from_numpy(np.frombuffer(vector, np.float32).copy()) - expected[key]
        assert float(apart.norm() / expected[key].norm()) < CLOSE, key
