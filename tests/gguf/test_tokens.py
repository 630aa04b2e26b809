"""GGUF files written by Quintet give the model's tokens, in Quintet and in llama.cpp."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quintet.deploy.config.model import tokenizer_files
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.executor.checkpoints.gguf.writing import attention_metadata
from quintet.executor.checkpoints.gguf.writing.conversions import CONVERT, Named, as_it_is
from quintet.executor.checkpoints.gguf.writing.model import plan_of, write_gguf
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES
from tests.gguf.families import ROWS
from tests.gguf.files import names_of_ids, write_model
from tests.gguf.vocabularies import LLAMA_CPP
from tests.models.equality import load, one_torch_thread
from tests.models.random_checkpoints import NUM_TOKENS, Expectation
from tests.models.test_equal import check_once, made


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer_files, "_default_cache", lambda: tmp_path / "tokenizers")
    with one_torch_thread():
        yield


@pytest.mark.drawn(10)
@pytest.mark.parametrize("family", ROWS)
def test_a_file_has_the_tokens_of_its_model(family: str, tmp_path: Path) -> None:
    row = ROWS[family]
    expected = made(row, tmp_path)
    file = tmp_path / "model.gguf"
    write_model(tmp_path, file, "f32")
    check_once(load(file), row, expected)


def _with_fused_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files of older converters: one tensor of latent projections, and no keys for the compressed cache."""
    monkeypatch.delitem(CONVERT, "deepseek2")
    known = attention_metadata.ATTENTION["deepseek2"]

    def older(config: dict[str, Any]) -> dict[str, Any]:
        metadata = known(config)
        heads = {"attention.head_count_kv": config["num_attention_heads"]}
        widths = {
            f"attention.{kind}_length": metadata[f"attention.{kind}_length_mla"] for kind in ("key", "value")
        }
        return metadata | heads | widths | {f"{key}_mla": None for key in widths}

    monkeypatch.setitem(attention_metadata.ATTENTION, "deepseek2", older)


def _with_fused_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files of older converters: one tensor of queries, keys, values and gates, by KV head."""
    known = CONVERT["qwen3next"]

    def older(block: str, leaf: str, name: str, config: dict[str, Any]) -> Iterator[Named]:
        if leaf == "linear_attn.in_proj_qkvz.weight":
            yield f"{block}.ssm_in.weight", as_it_is
        else:
            yield from known(block, leaf, name, config)

    monkeypatch.setitem(CONVERT, "qwen3next", older)


_OLDER = {"deepseek2": _with_fused_latents, "qwen3next": _with_fused_projections}


@pytest.mark.parametrize("family", _OLDER)
def test_files_of_older_converters_are_loaded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, file = made(ROWS[family], tmp_path), tmp_path / "model.gguf"
    write_model(tmp_path, file)
    names = {name for name, _ in read_parts(file).tensors()}
    _OLDER[family](monkeypatch)
    write_model(tmp_path, file)
    assert {name for name, _ in read_parts(file).tensors()} != names
    check_once(load(file), ROWS[family], expected)


_MULTIMODAL = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
"""Multimodal architectures, and the text architectures with the same computation."""


def _write_as(multimodal: str, folder: Path) -> None:
    """Write the folder's model as the text part of a multimodal one."""
    plan, plain = plan_of(folder, MIXES["f32"]), _MULTIMODAL[multimodal]
    metadata = {key.replace(f"{plain}.", f"{multimodal}."): value for key, value in plan.metadata.items()}
    metadata |= {f"{multimodal}.rope.dimension_sections": [3, 3, 2, 0], f"{multimodal}.n_deepstack_layers": 0}
    write_gguf(replace(plan, arch=multimodal, metadata=metadata), folder / "model.gguf", names_of_ids(folder))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("multimodal", _MULTIMODAL)
def test_a_multimodal_file_is_loaded_as_its_text_model(multimodal: str, tmp_path: Path) -> None:
    expected = made(ROWS[_MULTIMODAL[multimodal]], tmp_path)
    _write_as(multimodal, tmp_path)
    check_once(load(tmp_path / "model.gguf"), ROWS[_MULTIMODAL[multimodal]], expected)


_LLAMA_CPP_DIFFERS = {
    "phi3, window": "llama.cpp has no sliding window in it",
    "exaone4, some layers slide": "llama.cpp has a sliding window only in models of 64 layers",
    "command-r, normed queries": "llama.cpp reads these norms only in models of 64 layers",
    "baichuan": "llama.cpp applies RoPE only in models of 32 layers",
    "chatglm": "llama.cpp assumes that the width of all heads equals the hidden size",
    "deci": "llama.cpp takes the head width from the first layer, which has no heads here",
    "deepseek": "llama.cpp does not normalize the router weights, which this model does",
    "deepseek2, softmax": "llama.cpp has uncompressed queries only in models of 27 layers",
    "deepseek2, softmax, groups": "llama.cpp ranks groups by their two best experts, as for DeepSeek V3",
    "gpt-oss": "llama.cpp rounds the borders of YaRN scaling",
    "phimoe": "llama.cpp uses softmax routing instead of the model's sparse mixer",
}
_LLAMA_CPP_GENERATE = """
import json, sys
from llama_cpp import Llama
file, prompts, count = json.load(sys.stdin)
model = Llama(file, n_ctx=96, n_threads=1, type_k=0, type_v=0, verbose=False)
outputs = []
for prompt in prompts:
    tokens = []
    for token in model.generate(prompt, top_k=1, temp=0.0):
        tokens.append(int(token))
        if len(tokens) == count:
            break
    outputs.append(tokens)
print(json.dumps(outputs))
"""


def llama_cpp_outputs(file: Path, expected: list[Expectation]) -> list[list[int]]:
    arguments = [str(file), [each.prompt for each in expected], NUM_TOKENS]
    done = subprocess.run(
        [LLAMA_CPP, "-c", _LLAMA_CPP_GENERATE],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=True,
    )
    outputs: list[list[int]] = json.loads(done.stdout)
    return outputs


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed")
@pytest.mark.parametrize("family", [family for family in ROWS if family not in _LLAMA_CPP_DIFFERS])
def test_llama_cpp_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    expected = made(ROWS[family], tmp_path)
    write_model(tmp_path, tmp_path / "model.gguf", "f32")
    assert llama_cpp_outputs(tmp_path / "model.gguf", expected) == [each.outputs for each in expected]


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed")
@pytest.mark.parametrize("multimodal", _MULTIMODAL)
def test_llama_cpp_gives_the_same_tokens_for_multimodal_files(multimodal: str, tmp_path: Path) -> None:
    expected = made(ROWS[_MULTIMODAL[multimodal]], tmp_path)
    _write_as(multimodal, tmp_path)
    assert llama_cpp_outputs(tmp_path / "model.gguf", expected) == [each.outputs for each in expected]
