"""A GGUF file of a model gives the tokens of the model, by us and by llama.cpp: so our own writer of files is right, too."""

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
from quintet.executor.checkpoints.gguf.writing import routed_metadata
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
def test_a_files_tokens_are_its_models(family: str, tmp_path: Path) -> None:
    row = ROWS[family]
    expected = made(row, tmp_path)
    file = tmp_path / "model.gguf"
    write_model(tmp_path, file, "f32")
    check_once(load(file), row, expected)


def _with_latents_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What heads make of latents is one tensor, and no key is of what is kept."""
    monkeypatch.delitem(CONVERT, "deepseek2")
    known = routed_metadata.ROUTED["deepseek2"]

    def older(config: dict[str, Any]) -> dict[str, Any]:
        said = known(config)
        heads = {"attention.head_count_kv": config["num_attention_heads"]}
        widths = {
            f"attention.{kind}_length": said[f"attention.{kind}_length_mla"] for kind in ("key", "value")
        }
        return said | heads | widths | {f"{key}_mla": None for key in widths}

    monkeypatch.setitem(routed_metadata.ROUTED, "deepseek2", older)


def _with_projections_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, values and gates are one tensor, head by head of keys."""
    known = CONVERT["qwen3next"]

    def older(block: str, leaf: str, name: str, config: dict[str, Any]) -> Iterator[Named]:
        if leaf == "linear_attn.in_proj_qkvz.weight":
            yield f"{block}.ssm_in.weight", as_it_is
        else:
            yield from known(block, leaf, name, config)

    monkeypatch.setitem(CONVERT, "qwen3next", older)


_OLDER = {"deepseek2": _with_latents_whole, "qwen3next": _with_projections_whole}


@pytest.mark.parametrize("family", _OLDER)
def test_files_of_older_converters_are_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, file = made(ROWS[family], tmp_path), tmp_path / "model.gguf"
    write_model(tmp_path, file)
    names = {name for name, _ in read_parts(file).tensors()}
    _OLDER[family](monkeypatch)
    write_model(tmp_path, file)
    assert {name for name, _ in read_parts(file).tensors()} != names
    check_once(load(file), ROWS[family], expected)


_SEES = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
"""Architectures that also see, and those that compute the same of text."""


def _write_as(seeing: str, folder: Path) -> None:
    """Write the folder's model as the text part of one that sees."""
    plan, plain = plan_of(folder, MIXES["f32"]), _SEES[seeing]
    said = {key.replace(f"{plain}.", f"{seeing}."): value for key, value in plan.metadata.items()}
    said |= {f"{seeing}.rope.dimension_sections": [3, 3, 2, 0], f"{seeing}.n_deepstack_layers": 0}
    write_gguf(replace(plan, arch=seeing, metadata=said), folder / "model.gguf", names_of_ids(folder))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seeing", _SEES)
def test_what_sees_is_read_for_its_text(seeing: str, tmp_path: Path) -> None:
    expected = made(ROWS[_SEES[seeing]], tmp_path)
    _write_as(seeing, tmp_path)
    check_once(load(tmp_path / "model.gguf"), ROWS[_SEES[seeing]], expected)


_OTHERWISE = {
    "phi3, window": "llama.cpp lets every layer of it see everything",
    "exaone4, some layers slide": "llama.cpp slides in models of 64 layers alone",
    "command-r, normed queries": "llama.cpp reads these norms in models of 64 layers alone",
    "baichuan": "llama.cpp rotates in models of 32 layers alone",
    "chatglm": "llama.cpp takes the width of all heads for the model's",
    "deci": "llama.cpp takes the width of heads from the first layer, which has none here",
    "deepseek": "llama.cpp does not divide the weights of the chosen by their sum in it, as this one does",
    "deepseek2, softmax": "llama.cpp makes queries at once in models of 27 layers alone",
    "deepseek2, softmax, groups": "llama.cpp judges a group by its two best, as DeepSeek V3 does",
    "gpt-oss": "llama.cpp rounds where its rotation begins and ends to be stretched",
    "phimoe": "llama.cpp takes a softmax where the model mixes sparsely",
}
_ASK = """
import json, sys
from llama_cpp import Llama
file, prompts, count = json.load(sys.stdin)
model = Llama(file, n_ctx=96, n_threads=1, type_k=0, type_v=0, verbose=False)
told = []
for prompt in prompts:
    tokens = []
    for token in model.generate(prompt, top_k=1, temp=0.0):
        tokens.append(int(token))
        if len(tokens) == count:
            break
    told.append(tokens)
print(json.dumps(told))
"""


def said_by_llama_cpp(file: Path, expected: list[Expectation]) -> list[list[int]]:
    asked = [str(file), [each.prompt for each in expected], NUM_TOKENS]
    done = subprocess.run(
        [LLAMA_CPP, "-c", _ASK], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    said: list[list[int]] = json.loads(done.stdout)
    return said


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed beside")
@pytest.mark.parametrize("family", [family for family in ROWS if family not in _OTHERWISE])
def test_llama_cpp_says_the_same(family: str, tmp_path: Path) -> None:
    expected = made(ROWS[family], tmp_path)
    write_model(tmp_path, tmp_path / "model.gguf", "f32")
    assert said_by_llama_cpp(tmp_path / "model.gguf", expected) == [each.outputs for each in expected]


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed beside")
@pytest.mark.parametrize("seeing", _SEES)
def test_llama_cpp_says_the_same_of_what_sees(seeing: str, tmp_path: Path) -> None:
    expected = made(ROWS[_SEES[seeing]], tmp_path)
    _write_as(seeing, tmp_path)
    assert said_by_llama_cpp(tmp_path / "model.gguf", expected) == [each.outputs for each in expected]
