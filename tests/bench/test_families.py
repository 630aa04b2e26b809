"""Byte counts of `bench.families`: a step, its chosen experts, and a Llama of the same size."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.families.kinds import KINDS, hf_config_of, llama_hf_config
from bench.families.models import Decoding, Setup, open_model

from quintet.executor.backends.cpu.ops.host_library import open_library

pytestmark = pytest.mark.skipif(open_library() is None, reason="the host kernels are not built")

SMALL = {"num_hidden_layers": 2, "vocab_size": 512, "n_layer": 2}


def decoding(folder: Path, hf_config: dict[str, object], rows: int) -> Decoding:
    setup = Setup("bfloat16", "none", "quintet", threads=1, max_rows=rows, context=32, max_steps=8)
    return Decoding(*open_model(folder, hf_config | SMALL, setup), rows, setup.context)


def test_bytes_count_the_chosen_experts(tmp_path: Path) -> None:
    hf_config = hf_config_of("experts", "bfloat16")
    one, four = (decoding(tmp_path / str(rows), hf_config, rows).step_bytes() for rows in (1, 4))
    expert = 3 * hf_config["hidden_size"] * hf_config["intermediate_size"] * 2
    layers, chosen, experts = 2, hf_config["num_experts_per_tok"], hf_config["num_local_experts"]
    assert layers * chosen * expert < one < layers * (chosen + 1) * expert
    more, keys = four - one, 3 * 33 * layers * 2 * 4 * 64 * 2
    assert more >= layers * expert  # rows have different tokens, so different experts
    assert more % expert == keys and more <= layers * (experts - chosen) * expert + keys


@pytest.mark.parametrize("kind", ["llama", "learned positions", "experts"])
def test_equivalent_llama_reads_as_many_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "llama", KINDS["llama"] | SMALL)
    hf_config = hf_config_of(kind, "bfloat16")
    wanted = decoding(tmp_path / "kind", hf_config, 2).step_bytes()
    llama = llama_hf_config("bfloat16", "none", hf_config, wanted, 2 * 32)
    assert decoding(tmp_path / "llama", llama, 2).step_bytes() == pytest.approx(wanted, rel=0.02)
