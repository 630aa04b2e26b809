"""Files that `quintet quantize` writes: types equal llama.cpp's, and numbers and vocabularies are exact."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from quintet.deploy.config.gguf.tokenizer import tokenizer_of_gguf
from quintet.deploy.config.gguf.vocabulary import vocabulary_of
from quintet.executor.checkpoints.gguf.parts import read_parts
from quintet.executor.checkpoints.gguf.writing.model import add_value, plan_of, write_gguf
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES, Model, type_of
from quintet.wire.errors import ConfigError
from tests.gguf.files import names_of_ids, write_model
from tests.gguf.test_tokenizer import made as tokenizer_made
from tests.gguf.vocabularies import KINDS, LLAMA_CPP, strings
from tests.models.equality import alone, load, max_difference
from tests.models.random_checkpoints import Expectation, Logits, Row, batched_logits, of_transformers
from tests.models.test_equal import made

_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
CLOSE = 3e-3
"""See `tests.gguf.test_packed`."""
CLEAR = 0.1
"""Minimum lead of a choice, in standard deviations, to compare with llama.cpp, which rounds activations to 8 bits."""


def rounded(row: Row, mix: str, target: Path) -> Row:
    """Return the row with the numbers of its file, which making the row writes to ``target``."""

    def make(folder: Path) -> Logits:
        row.make(folder)
        write_model(folder, target, mix)
        tensors = load_file(folder / "model.safetensors")
        places = {each.laid.name: each.laid.sources for each in plan_of(folder, MIXES[mix]).tensors}
        for each in gguf.GGUFReader(target).tensors:
            (source,) = places[each.name]
            numbers = torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
            tensors[source] = numbers.view(tensors[source].shape)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        return batched_logits(model.float().eval())

    return Row(make)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("mix", MIXES)
def test_a_file_has_the_tokens_of_its_numbers(mix: str, tmp_path: Path) -> None:
    expected = made(rounded(of_transformers("Qwen2Config", **_WIDE), mix, tmp_path / "model.gguf"), tmp_path)
    outcome = alone(load(tmp_path / "model.gguf", "float32"), [each.prompt for each in expected])
    assert max_difference(outcome, expected) < CLOSE
    assert outcome.outputs == [each.outputs for each in expected]


_LLAMA_CPP_GENERATE = """
import ctypes, json, sys
import gguf, llama_cpp
files, prompts, count, plain, kinds = json.load(sys.stdin)
outputs = {}
for file in files:
    model = llama_cpp.Llama(file, n_ctx=96, n_threads=1, verbose=False)
    outputs[file] = []
    for prompt in prompts[file]:
        tokens = []
        for token in model.generate(prompt, top_k=1, temp=0.0):
            tokens.append(int(token))
            if len(tokens) == count:
                break
        outputs[file].append(tokens)
types = {}
for kind, number in kinds.items():
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, target = number, plain + kind
    assert llama_cpp.llama_model_quantize(plain.encode(), target.encode(), ctypes.byref(params)) == 0
    types[kind] = {each.name: each.tensor_type.name for each in gguf.GGUFReader(target).tensors}
print(json.dumps([outputs, types]))
"""


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed")
def test_llama_cpp_gives_the_same_tokens_and_types(tmp_path: Path) -> None:
    expected: dict[str, list[Expectation]] = {}
    for mix in ("q8_0", "q5_1", "iq4_nl", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"):
        (tmp_path / mix).mkdir()
        file = tmp_path / f"{mix}.gguf"
        expected[str(file)] = made(
            rounded(of_transformers("Qwen2Config", **_WIDE), mix, file), tmp_path / mix
        )
    kinds = {mix: int(gguf.LlamaFileType[each.file_type]) for mix, each in MIXES.items()}
    prompts = {file: [each.prompt for each in its] for file, its in expected.items()}
    deep = tmp_path / "deep"  # enough layers for every rule of layer types
    of_transformers("Qwen2Config", hidden_size=256, intermediate_size=256, num_hidden_layers=17).make(deep)
    write_model(deep, deep / "bf16", "bf16")
    arguments = [list(expected), prompts, 12, str(deep / "bf16"), kinds]
    done = subprocess.run(
        [LLAMA_CPP, "-c", _LLAMA_CPP_GENERATE],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == -signal.SIGILL:
        pytest.skip("llama.cpp was built for another processor")
    assert done.returncode == 0, done.stderr[-4000:]
    outputs, types = json.loads(done.stdout)
    compared = 0
    for file, its in expected.items():
        for each, tokens in zip(its, outputs[file], strict=True):
            clear = num_clear(each)
            assert tokens[:clear] == each.outputs[:clear], file
            compared += clear
    assert compared > 3 * len(expected)
    for mix in MIXES:
        ours = {each.laid.name: each.type.name for each in plan_of(deep, MIXES[mix]).tensors}
        assert ours == types[mix], mix


def num_clear(expected: Expectation) -> int:
    """Return the number of first choices with a clear lead."""
    best = expected.logits.topk(2, dim=1).values
    leads = (best[:, 0] - best[:, 1]) / expected.logits.std(1)
    return next((place for place, lead in enumerate(leads.tolist()) if lead < CLEAR), len(leads))


def test_rows_that_are_not_whole_blocks_use_another_type() -> None:
    names = {
        "blk.0.attn_q.weight": (896, 896),
        "blk.0.ffn_up.weight": (512, 1024),
        "blk.0.attn_k.weight": (8, 40),
    }
    found = {
        name: type_of(MIXES["q4_k_m"], name, shape, Model(24, False, 7)).name for name, shape in names.items()
    }
    assert list(found.values()) == ["Q5_0", "Q4_K", "F16"]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", KINDS)
def test_a_vocabulary_is_written_unchanged(name: str, tmp_path: Path) -> None:
    wanted = tokenizer_made(name, tmp_path)
    (folder,) = (tmp_path / "cache").iterdir()
    size = wanted.get_vocab_size()
    (folder / "config.json").write_text("{}")
    again = tmp_path / "again.gguf"
    metadata = vocabulary_of(folder, folder, size + 3)
    write_vocabulary(metadata, again)
    read = tokenizer_of_gguf(read_parts(again), tmp_path / "cache")
    found = Tokenizer.from_file(str(read / "tokenizer.json"))
    for text in strings(400, seed=3):
        assert found.encode(text).ids == wanted.encode(text).ids, text
    kinds = metadata["tokenizer.ggml.token_type"]
    assert len(kinds) == size + 3 and kinds[-3:] == [5, 5, 5]


@pytest.mark.parametrize("name", ["byte pairs, gpt-2", "SentencePiece"])
def test_an_added_token_beyond_the_vocabulary_is_omitted(name: str, tmp_path: Path) -> None:
    """Gemma 3's text models have no row for the tokenizer's image token."""
    tokenizer = tokenizer_made(name, tmp_path)
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "config.json").write_text("{}")
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert "<image>" not in vocabulary_of(folder, folder, size)["tokenizer.ggml.tokens"]
    with pytest.raises(ConfigError, match=f"vocab_size is 99, but the tokenizer has {size + 1} tokens"):
        vocabulary_of(folder, folder, 99)


def write_vocabulary(metadata: Mapping[str, Any], target: Path) -> None:
    writer = gguf.GGUFWriter(str(target), "llama")
    for key, value in metadata.items():
        add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_integers_are_written_as_floats_if_the_format_requires_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "granite")
    for key, value in {"granite.embedding_scale": 12, "granite.block_count": 2}.items():
        add_value(writer, key, value)
    kinds = {key: value.type for key, value in writer.kv_data[0].items() if key.startswith("granite.")}
    assert kinds == {
        "granite.embedding_scale": gguf.GGUFValueType.FLOAT32,
        "granite.block_count": gguf.GGUFValueType.UINT32,
    }


def test_a_setting_without_a_gguf_key_is_rejected(tmp_path: Path) -> None:
    of_transformers("Qwen2Config", use_sliding_window=True, sliding_window=9, max_window_layers=1).make(
        tmp_path
    )
    with pytest.raises(
        ConfigError,
        match=r"cannot express layers\[\d\]\.mixer\.window: the config has 9, a file would have None",
    ):
        write_gguf(plan_of(tmp_path, MIXES["q8_0"]), tmp_path / "model.gguf", names_of_ids(tmp_path))


def test_a_tensor_without_a_gguf_name_is_rejected(tmp_path: Path) -> None:
    of_transformers("Qwen2Config").make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.0.odd.weight": torch.ones(4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="GGUF's architecture 'qwen2' has no tensor for"):
        plan_of(tmp_path, MIXES["q8_0"])
