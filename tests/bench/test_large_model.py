"""The file of an 8 B shape that engines are measured with, by a smaller one of its kind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from bench.peers.large import CONFIG, write_large

SMALL = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "vocab_size": 4096, "bos_token_id": 4093, "eos_token_id": 4093}  # fmt: skip


@pytest.mark.parametrize(("kind", "types"), [("q4_k_m", {"Q4_K": 49, "Q6_K": 9}), ("q8_0", {"Q8_0": 58})])
def test_blocks_are_weights_of_the_usual_size_in_the_types_of_such_a_file(
    tmp_path: Path, kind: str, types: dict[str, int]
) -> None:
    path = write_large(tmp_path / "small.gguf", kind, SMALL)
    tensors = gguf.GGUFReader(path).tensors
    assert Counter(each.tensor_type.name for each in tensors) == types | {"F32": 17}
    for tensor in tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type.name != "F32":
            assert abs(float(numbers.mean())) < 0.002
            assert 0.01 < float(np.std(numbers)) < 0.03
    assert write_large(path, kind, SMALL) == path
