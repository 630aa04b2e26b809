"""Contradictory files of one checkpoint: end-of-sequence tokens, output layer, architecture."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.model.stop_tokens import configured_ids, end_token_ids
from quintet.executor.model_config.registry import FAMILIES, architecture_of
from quintet.wire.errors import ConfigError

RUN_DIR = Path("/nowhere/quintet-test")

# end-of-sequence tokens

TOKENS = {
    "<|endoftext|>": 0,
    "<s>": 1,
    "</s>": 2,
    "<|im_start|>": 3,
    "<|im_end|>": 4,
    "<|end|>": 5,
    "<|return|>": 6,
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}<|end|>{% endfor %}"
)
ENDLESS = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% endfor %}"
SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
TITLED = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} {{ eos_token }}{% endfor %}"


def write_tokenizer(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    added = [{"id": number, "content": content, "special": True} for content, number in TOKENS.items()]
    (folder / "tokenizer.json").write_text(
        json.dumps({"added_tokens": added, "model": {"vocab": {"ordinary": 50}}})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("configured", "tokenizer", "template", "ids"),
    [
        ([0], {"eos_token": "<|im_end|>"}, None, [0, 4]),
        ([0], {"eos_token": {"content": "<|im_end|>"}}, CHATML, [0, 4]),
        ([0], {"eos_token": "<|endoftext|>"}, CHATML, [0, 4]),
        ([], {}, CHATML, [4]),
        ([2], {"eos_token": "<|return|>"}, HARMONY, [2, 6]),
        ([2], {}, PARTS, [2, 5]),
        ([2], {}, ENDLESS, [2]),
        ([0], {"eos_token": "</s>"}, TITLED, [0, 2]),
        ([], {}, SYSTEM, [4]),
        ([], {"eos_token": "ordinary"}, None, [50]),
        ([], {"eos_token": "<late>", "added_tokens_decoder": {"70": {"content": "<late>"}}}, None, [70]),
        ([7, 7], {"eos_token": "<nowhere>"}, None, [7]),
        ([2], {}, "{% for m in messages %}{{ raise_exception('roles') }}{% endfor %}", [2]),
        ([2], {}, "{% for m in", [2]),
        ([2], {}, "You are a helpful assistant.", [2]),
    ],
)
def test_eos_tokens_of_all_files_end_an_answer(
    tmp_path: Path, configured: list[int], tokenizer: dict[str, Any], template: str | None, ids: list[int]
) -> None:
    folder = write_tokenizer(tmp_path, **tokenizer)
    templates = {} if template is None else {"default": template}
    assert end_token_ids(configured, folder, templates) == ids


def test_eos_token_of_each_tokenizer_file_counts(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, eos_token="<|im_end|>")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert end_token_ids([0], folder, {}) == [0, 4, 2]


def test_eos_token_of_a_unigram_model(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, eos_token="</end>")
    model = {"type": "Unigram", "vocab": [["<unk>", 0], ["</end>", -1.5]]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert end_token_ids([], folder, {}) == [1]


def test_eos_tokens_of_all_files_reach_the_configuration(tmp_path: Path) -> None:
    folder = write_model(tmp_path, eos_token_id=0)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    write_tokenizer(folder, eos_token="<|im_end|>", chat_template=PARTS)
    model = resolve(Options(model=str(folder), executor="mock"), RUN_DIR).config.model
    assert model.eos_token_ids == [1, 0, 4, 5]


def test_eos_tokens_of_the_text_config_reach_the_configuration(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path, eos_token_id=None, text_config={"eos_token_id": [1, 106]}))
    assert facts.eos_token_ids == [1, 106]


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (2.0, [2]),
        ("2", [2]),
        ([1, None, "x", 2.5, True, "3", 4.0], [1, 3, 4]),
        (None, []),
        ("</s>", []),
        ("9" * 5000, []),
    ],
    ids=str,
)
def test_eos_token_ids_of_unusual_types(value: object, ids: list[int]) -> None:
    assert configured_ids({"eos_token_id": value}, None, []) == ids


def test_eos_token_beyond_the_vocabulary_is_dropped(tmp_path: Path) -> None:
    folder = write_model(tmp_path, eos_token_id=0, vocab_size=4)
    write_tokenizer(folder, eos_token="<|im_end|>")
    resolution = resolve(Options(model=str(folder), executor="mock"), RUN_DIR)
    assert resolution.config.model.eos_token_ids == [0]
    assert any("eos_token_id 4" in note for note in resolution.notes)


# output layers


def write_tensors(path: Path, **tensors: tuple[str, list[int], bytes]) -> None:
    """Write a safetensors file; dots of names are spelled ``__``."""
    header, data = dict[str, Any](), b""
    for name, (dtype, shape, content) in tensors.items():
        spelled = name.replace("__", ".")
        header[spelled] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


NUMBERS = bytes(range(200)) * 64  # [100, 64] in bf16
OTHERS = NUMBERS[:-1] + b"\xff"


@pytest.mark.parametrize(
    ("tensors", "has_own"),
    [
        ({"lm_head__weight": ("BF16", [100, 64], OTHERS)}, True),
        ({"model__lm_head__weight": ("BF16", [100, 64], OTHERS)}, True),
        ({"lm_head__weight": ("F32", [100, 64], NUMBERS * 2)}, True),
        ({"lm_head__weight": ("BF16", [100, 64], NUMBERS)}, False),
        ({"lm_head__weight": ("BF16", [50, 64], NUMBERS[: 50 * 128])}, False),
        ({}, False),
    ],
)
def test_checkpoint_with_an_output_layer_is_not_tied(
    tmp_path: Path, tensors: dict[str, Any], has_own: bool
) -> None:
    folder = write_model(tmp_path, tie_word_embeddings=True)
    embedding = {"model__embed_tokens__weight": ("BF16", [100, 64], NUMBERS)}
    write_tensors(folder / "model.safetensors", **embedding, **tensors)
    facts = read_facts(folder, with_weights=True)
    assert (json.loads(facts.hf_config)["tie_word_embeddings"], bool(facts.notes)) == (not has_own, has_own)
    tied = read_facts(folder)
    assert tied.num_parameters is not None and facts.num_parameters is not None
    assert facts.num_parameters - tied.num_parameters == (6400 if has_own else 0)


def test_an_output_layer_in_another_file_is_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tie_word_embeddings=True)
    write_tensors(folder / "model-1.safetensors", embed_tokens__weight=("BF16", [100, 64], NUMBERS))
    write_tensors(folder / "model-2.safetensors", lm_head__weight=("BF16", [100, 64], OTHERS))
    assert read_facts(folder, with_weights=True).notes


def test_family_with_tied_embeddings_by_default(tmp_path: Path) -> None:
    text = {"tie_word_embeddings": True, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}
    folder = write_model(tmp_path, architectures=["Gemma3ForCausalLM"], **text)
    tensors = {name: ("BF16", [100, 64], content) for name, content in
               {"model__embed_tokens__weight": NUMBERS, "lm_head__weight": OTHERS}.items()}  # fmt: skip
    write_tensors(folder / "model.safetensors", **tensors)
    assert json.loads(read_facts(folder, with_weights=True).hf_config)["tie_word_embeddings"] is False


TEXT = {
    "tie_word_embeddings": True,
    "model_type": "mistral",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("has_head", [False, True])
def test_contradictory_ties_follow_the_checkpoint(tmp_path: Path, has_head: bool) -> None:
    names = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": False}
    folder = write_model(tmp_path, **names, text_config=TEXT)
    head = {"language_model__lm_head__weight": ("BF16", [100, 64], NUMBERS)} if has_head else {}
    embedding = {"language_model__model__embed_tokens__weight": ("BF16", [100, 64], NUMBERS)}
    write_tensors(folder / "model.safetensors", **embedding, **head)
    facts = read_facts(folder, with_weights=True)
    assert json.loads(facts.hf_config)["tie_word_embeddings"] is not has_head
    assert len(facts.notes) == (not has_head)


# architectures


@pytest.mark.parametrize(
    ("model_type", "is_part", "name"),
    [
        ("llama", False, "LlamaForCausalLM"),
        ("qwen2_moe", False, "Qwen2MoeForCausalLM"),
        ("gpt2", False, "GPT2LMHeadModel"),
        ("gpt_neox", False, "GPTNeoXForCausalLM"),
        ("gpt_oss", False, "GptOssForCausalLM"),
        ("gemma3_text", False, "Gemma3ForCausalLM"),
        ("gemma3", True, "Gemma3ForConditionalGeneration"),
        ("mistral3", True, "Mistral3ForConditionalGeneration"),
        ("qwen2_5_vl", True, "Qwen2_5_VLForConditionalGeneration"),
        ("deepseek_v3", False, "DeepseekV3ForCausalLM"),
        ("falcon_h1", False, "FalconH1ForCausalLM"),
        ("refinedweb", False, "RWForCausalLM"),
        ("new_kind", False, "NewKindForCausalLM"),
    ],
)
def test_model_type_gives_the_architecture(model_type: str, is_part: bool, name: str) -> None:
    assert architecture_of(model_type, is_part=is_part) == name
    assert name in FAMILIES or model_type == "new_kind"


@pytest.mark.parametrize("listed", [None, []])
def test_config_without_architectures_is_completed(tmp_path: Path, listed: list[str] | None) -> None:
    facts = read_facts(write_model(tmp_path, architectures=listed, model_type="llama"))
    assert facts.architecture == "LlamaForCausalLM"
    assert json.loads(facts.hf_config)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        (["LlamaModel", "LlamaForCausalLM"], "LlamaForCausalLM"),
        (["FSDPLlamaForCausalLM"], "LlamaForCausalLM"),
        (["UnseenForCausalLM"], "UnseenForCausalLM"),
    ],
)
def test_a_known_architecture_is_preferred(tmp_path: Path, listed: list[str], name: str) -> None:
    facts = read_facts(write_model(tmp_path, architectures=listed, model_type="llama"))
    assert facts.architecture == name
    assert json.loads(facts.hf_config)["architectures"] == [name]


def test_config_without_model_type_and_architectures_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither `architectures` nor `model_type`"):
        read_facts(write_model(tmp_path, architectures=None))
