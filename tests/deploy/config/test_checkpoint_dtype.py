"""Data type of a checkpoint, under the names and in the places that its writers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.deploy.config.model_folder import write_model

from quintet.deploy.config.model.hf_config import read_facts
from quintet.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": "half"}, "float16"),
        ({"torch_dtype": "float64"}, "float32"),
        ({"torch_dtype": "float8_e4m3fn"}, "bfloat16"),
        ({"torch_dtype": "auto"}, "float32"),
        ({"torch_dtype": None, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "auto", "text_config": {"torch_dtype": "float16"}}, "float16"),
        ({}, "float32"),
    ],
    ids=str,
)
def test_dtype_is_read_from_every_place(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    folder = write_model(tmp_path, **{"dtype": None, "torch_dtype": None, **config})
    assert read_facts(folder).dtype == dtype


def test_dtype_missing_in_the_config_is_that_of_most_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path, dtype=None, torch_dtype=None)
    tensors = {"a": torch.zeros(9, dtype=torch.float32), "b": torch.zeros(10, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    assert read_facts(folder, with_weights=True).dtype == "bfloat16"


def test_an_unknown_dtype_is_named_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype is 'posit16'.*--hf-overrides"):
        read_facts(write_model(tmp_path, dtype="posit16", torch_dtype=None))
