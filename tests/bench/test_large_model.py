"""Synthetic weight files for benchmarks, checked on smaller ones of the same kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from bench.peers.random_gguf import CONFIGS, write_random
from bench.peers.token_bytes import token_bytes

_SIZES = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
SMALL = {
    "L": CONFIGS["L"] | _SIZES | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512},
    "E": CONFIGS["E"] | _SIZES | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96},
}


@pytest.mark.parametrize(
    ("model", "kind", "types"),
    [
        ("L", "q4_k_m", {"Q4_K": 49, "Q6_K": 9, "F32": 17}),
        ("L", "q8_0", {"Q8_0": 58, "F32": 17}),
        ("E", "mxfp4", {"Q8_0": 34, "MXFP4": 24, "F32": 97}),
    ],
)
def test_blocks_have_typical_scale_and_types(
    tmp_path: Path, model: str, kind: str, types: dict[str, int]
) -> None:
    path = write_random(tmp_path / "small.gguf", kind, SMALL[model])
    tensors = gguf.GGUFReader(path).tensors
    assert Counter(each.tensor_type.name for each in tensors) == types
    for tensor in tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type.name != "F32":
            assert abs(float(numbers.mean())) < 0.002
            assert 0.01 < float(np.std(numbers)) < 0.03
    assert write_random(path, kind, SMALL[model]) == path


def test_token_reads_chosen_experts_and_one_embedding_row(tmp_path: Path) -> None:
    path = write_random(tmp_path / "small.gguf", "mxfp4", SMALL["E"])
    sizes = {each.name: int(each.n_bytes) for each in gguf.GGUFReader(path).tensors}
    experts = sum(size for name, size in sizes.items() if "_exps." in name)
    rest = sum(sizes.values()) - experts - sizes["token_embd.weight"]
    assert token_bytes(path) == pytest.approx(rest + experts / 8, abs=len(sizes))
