"""Contradictory files of one checkpoint: end-of-sequence tokens, output layer, architecture, quantization."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model, write_weights

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import Overrides, read_facts
from quintet.deploy.config.model.stop_tokens import configured_ids, end_token_ids
from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.model_config.hf_config import HfConfig
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
    assert tied.spec.num_parameters is not None and facts.spec.num_parameters is not None
    assert facts.spec.num_parameters - tied.spec.num_parameters == (6400 if has_own else 0)


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


@pytest.mark.parametrize("head", [None, "lm_head__weight", "lm_head__qweight"])
def test_checkpoint_without_an_output_layer_is_tied(tmp_path: Path, head: str | None) -> None:
    """A fine-tune with ``tie_word_embeddings: false``, or a multimodal config with ties only at the top."""
    folder = write_model(tmp_path, tie_word_embeddings=False)
    write_tensors(folder / "model-1.safetensors", model__embed_tokens__weight=("BF16", [100, 64], NUMBERS))
    write_tensors(
        folder / "model-2.safetensors", **({head: ("BF16", [100, 64], NUMBERS)} if head is not None else {})
    )
    facts = read_facts(folder, with_weights=True)
    assert json.loads(facts.hf_config)["tie_word_embeddings"] is (head is None)
    assert [note for note in facts.notes if "they are tied" in note] == list(facts.notes)
    assert len(facts.notes) == (head is None)


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


@pytest.mark.parametrize(
    "architecture", ["Qwen2VLForConditionalGeneration", "Mistral3ForConditionalGeneration"]
)
def test_ties_of_the_whole_model_count(tmp_path: Path, architecture: str) -> None:
    text = {key: value for key, value in TEXT.items() if key != "tie_word_embeddings"}
    tied, untied = (
        read_facts(
            write_model(
                tmp_path / str(ties), architectures=[architecture], tie_word_embeddings=ties, text_config=text
            )
        ).spec.num_parameters
        for ties in (True, False)
    )
    assert tied is not None and untied is not None and untied - tied == 100 * 64


# quantization


@pytest.mark.parametrize(("section", "name"), [({}, None), ({"load_in_4bit": True}, "bitsandbytes")], ids=str)
def test_quantization_section_without_a_method(
    tmp_path: Path, section: dict[str, Any], name: str | None
) -> None:
    stored = read_facts(write_model(tmp_path, quantization_config=section)).stored
    assert (None if stored is None else stored.name) == name


def test_an_empty_quantization_section_does_not_hide_a_separate_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path, quantization_config={})
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    stored = read_facts(folder).stored
    assert stored is not None and stored.name == "gptq"


def test_quantization_of_mlx_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path, quantization_config={"group_size": 64, "bits": 4, "mode": "affine"})
    with pytest.raises(ConfigError, match=r"unsupported quant_method 'mlx'.*use a GGUF file"):
        read_facts(folder)


# RoPE settings

YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize("is_part", [False, True])
def test_rope_scaling_beside_rope_parameters_counts(tmp_path: Path, kind: str, is_part: bool) -> None:
    ropes = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {kind: "yarn", **YARN},
    }
    names = {"architectures": ["Mistral3ForConditionalGeneration"]}
    changes = names | {"text_config": TEXT | ropes} if is_part else ropes
    facts = read_facts(write_model(tmp_path, **changes))
    assert facts.spec.reach == 2048
    config = json.loads(facts.hf_config)
    config = config["text_config"] if is_part else config
    assert (config["rope_parameters"]["rope_theta"], config["rope_scaling"]) == (1e6, None)


@pytest.mark.parametrize(
    "override",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", **YARN}},
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_older_key_of_the_rope_type_overrides(tmp_path: Path, override: dict[str, Any], key: str) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = write_model(tmp_path, **{key: {"rope_type": "llama3", **llama3}})
    assert read_facts(folder, overrides=Overrides(override)).spec.reach == 2048


def test_rope_overrides_apply_to_full_attention(tmp_path: Path) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    gemma = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 8}
    folder = write_model(tmp_path, **gemma, rope_parameters=ropes)
    overrides = Overrides({"rope_scaling": {"factor": 2.0}, "rope_theta": 5e5})
    found = json.loads(read_facts(folder, overrides=overrides).hf_config)["rope_parameters"]
    assert found["full_attention"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert found["sliding_attention"] == ropes["sliding_attention"]


# lists of layers


@pytest.mark.parametrize(
    ("architecture", "lists"),
    [
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["full_attention"] * 3}),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"] * 2 + ["mtp"]}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}),
    ],
    ids=str,
)
def test_lists_may_have_entries_after_the_last_layer(
    tmp_path: Path, architecture: str, lists: dict[str, Any]
) -> None:
    """Entries of multi-token prediction layers, or of layers that ``--hf-overrides`` removes."""
    folder = write_model(tmp_path, architectures=[architecture], head_dim=16, **lists)
    assert len(read_facts(folder).kv_needs) == 2


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
        (["LlaMaForCausalLM"], "LlamaForCausalLM"),
    ],
)
def test_a_known_architecture_is_preferred(tmp_path: Path, listed: list[str], name: str) -> None:
    facts = read_facts(write_model(tmp_path, architectures=listed, model_type="llama"))
    assert facts.architecture == name
    assert json.loads(facts.hf_config)["architectures"] == [name]


def test_config_without_model_type_and_architectures_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither `architectures` nor `model_type`"):
        read_facts(write_model(tmp_path, architectures=None))


# quantization

W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
GROUPS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4}},
}
QLORA = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_format_under_the_older_key(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path, compression_config=GROUPS))
    assert facts.stored is not None and facts.stored.name == "compressed-tensors"
    assert json.loads(facts.hf_config)["quantization_config"] == GROUPS


@pytest.mark.parametrize("where", ["quantization_config", "text_config"])
def test_merged_weights_are_not_quantized(tmp_path: Path, where: str) -> None:
    section = QLORA if where == "quantization_config" else {"quantization_config": QLORA}
    folder = write_model(tmp_path, **{where: section})
    write_weights(folder / "model.safetensors", {"lm_head.weight": [100, 64]})
    assert (stored := read_facts(folder).stored) is not None and stored.name == "bitsandbytes"
    facts = read_facts(folder, with_weights=True)
    assert facts.stored is None and "no quantized weights" in facts.notes[-1]
    assert recognise(HfConfig(json.loads(facts.hf_config), "config.json")) is None
    write_weights(folder / "more.safetensors", {"model.layers.0.mlp.up_proj.weight.absmax": [2]})
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    found = read_facts(folder, with_weights=True).stored
    assert found is not None and found.name == stored.name
