"""A GGUF file of a model gives the tokens of the model, by us and by llama.cpp: so our own writer of files is right, too."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from bench.gguf_writer import write_model

from quintet.deploy.resolve import tokenizer_files
from tests.gguf.families import ROWS
from tests.gguf.vocabularies import LLAMA_CPP
from tests.models.equal import load, one_torch_thread
from tests.models.random_checkpoints import NUM_TOKENS
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
    write_model(tmp_path, file, "F32")
    check_once(load(file), row, expected)


_OTHERWISE = {
    "phi3, window": "llama.cpp lets every layer of it see everything",
    "exaone4, some layers slide": "llama.cpp slides in models of 64 layers alone",
    "command-r, normed queries": "llama.cpp reads these norms in models of 64 layers alone",
}
_ASK = """
import json, sys
from llama_cpp import Llama
file, prompts, count = json.load(sys.stdin)
model = Llama(file, n_ctx=96, n_threads=1, verbose=False)
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


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed beside")
@pytest.mark.parametrize("family", [family for family in ROWS if family not in _OTHERWISE])
def test_llama_cpp_says_the_same(family: str, tmp_path: Path) -> None:
    expected = made(ROWS[family], tmp_path)
    write_model(tmp_path, tmp_path / "model.gguf", "F32")
    asked = [str(tmp_path / "model.gguf"), [each.prompt for each in expected], NUM_TOKENS]
    done = subprocess.run(
        [LLAMA_CPP, "-c", _ASK], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [each.outputs for each in expected]
