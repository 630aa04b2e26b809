"""BitNet b1.58 as llama.cpp's converters wrote it: ternary weights, with the scale multiplied in or separate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quintet.deploy.cli.main import main
from tests.gguf.test_tokens import llama_cpp_outputs
from tests.gguf.vocabularies import LLAMA_CPP
from tests.models.equality import alone, load
from tests.models.random_checkpoints import Expectation, Logits, Row, batched_logits, of_transformers
from tests.models.test_equal import made

SETTINGS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
THETA, THETA_OF_2B4T = 10000.0, 500000.0
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
}
WAYS = ("numbers", "scales", "TQ1_0", "TQ2_0")
"""Encodings of matrices: floating-point numbers; ternary values and a separate scale; ternary blocks."""


def name_in_file(name: str) -> str:
    """Return the file's name of a folder's tensor."""
    module = name.removesuffix(".weight")
    if module in NAMES:
        return NAMES[module]
    _, _, layer, leaf = module.split(".", 3)
    return f"blk.{layer}.{NAMES[leaf]}"


def ternary_model(way: str, target: Path, theta: float = THETA) -> Row:
    """Return a model with ternary layers; making it writes the file to ``target``."""
    activation = "relu2" if theta == THETA_OF_2B4T else "silu"
    rope = {"rope_type": "default", "rope_theta": theta}
    plain = of_transformers("BitNetConfig", **SETTINGS, hidden_act=activation, rope_parameters=rope)

    def make(folder: Path) -> Logits:
        plain.make(folder)
        tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
        writer = writer_of(target, len(tensors["model.embed_tokens.weight"]), theta)
        for number, (name, tensor) in enumerate(sorted(tensors.items())):
            if not name.endswith("_proj.weight"):
                writer.add_tensor(f"{name_in_file(name)}.weight", tensor.float().numpy())
                continue
            scale = float(np.float16(tensor.shape[1] ** -0.5 * (1 + number / 64)))
            values = torch.randint(-1, 2, tensor.shape, generator=draw).float()
            tensors[name] = values * scale
            add(writer, name_in_file(name), values.numpy(), scale, way)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        return batched_logits(model.float().eval())

    return Row(make)


def writer_of(target: Path, num_tokens: int, theta: float) -> gguf.GGUFWriter:
    """Return a writer with the model's metadata, as written by llama.cpp's converter."""
    writer = gguf.GGUFWriter(str(target), "bitnet")
    writer.add_block_count(SETTINGS["num_hidden_layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(SETTINGS["hidden_size"])
    writer.add_feed_forward_length(SETTINGS["intermediate_size"])
    writer.add_head_count(SETTINGS["num_attention_heads"])
    writer.add_head_count_kv(SETTINGS["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(1.0)
    writer.add_vocab_size(num_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"token{index}" for index in range(num_tokens)])
    writer.add_token_types([1] * num_tokens)
    writer.add_token_merges(["t o"])
    writer.add_add_bos_token(False)
    return writer


def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], scale: float, way: str) -> None:
    """Write a ternary matrix, times a scale."""
    if way == "scales":
        writer.add_tensor(f"{name}.scale", np.array([scale], np.float32))
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))
        return
    numbers = values * np.float32(scale)
    if way == "numbers":
        writer.add_tensor(f"{name}.weight", numbers)
        return
    kind = gguf.GGMLQuantizationType[way]
    writer.add_tensor(f"{name}.weight", gguf.quantize(numbers, kind), raw_dtype=kind)


def _outputs(expected: list[Expectation]) -> list[list[int]]:
    return [each.outputs for each in expected]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("way", WAYS)
def test_ternary_files_give_the_tokens_of_the_model(way: str, tmp_path: Path) -> None:
    expected = made(ternary_model(way, tmp_path / "model.gguf"), tmp_path)
    loaded = load(tmp_path / "model.gguf")
    assert alone(loaded, [each.prompt for each in expected]).outputs == _outputs(expected)


def test_the_rope_base_of_2b4t_selects_its_activation(tmp_path: Path) -> None:
    expected = made(ternary_model("TQ2_0", tmp_path / "model.gguf", THETA_OF_2B4T), tmp_path)
    loaded = load(tmp_path / "model.gguf")
    assert alone(loaded, [each.prompt for each in expected]).outputs == _outputs(expected)


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed")
@pytest.mark.parametrize("way", ["numbers", "scales"])
def test_llama_cpp_gives_the_same_tokens(way: str, tmp_path: Path) -> None:
    """llama.cpp rounds activations in products with ternary blocks."""
    expected = made(ternary_model(way, tmp_path / "model.gguf"), tmp_path)
    assert llama_cpp_outputs(tmp_path / "model.gguf", expected) == _outputs(expected)


@pytest.mark.parametrize(
    ("kind", "scales", "written"),
    [
        ("F16", np.float16, torch.float32),
        ("BF16", np.float32, torch.float32),
        ("TQ2_0", np.float32, torch.bfloat16),
    ],
)
def test_a_ternary_product_is_rounded_once(
    kind: str, scales: type, written: torch.dtype, tmp_path: Path
) -> None:
    """A quantized matrix and its scale become bf16; a plain one keeps all bits, even in a mixed file."""
    of_transformers("BitNetConfig", **SETTINGS).make(tmp_path)
    tensors, draw = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    writer = writer_of(tmp_path / "model.gguf", 512, THETA)
    wanted = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            numbers = torch.randn(tensor.shape, generator=draw)
            if kind == "TQ2_0":
                numbers = 0.3 * torch.randint(-1, 2, tensor.shape, generator=draw)
            raw_kind, scale = gguf.GGMLQuantizationType[kind], np.array([0.7], scales)
            raw = gguf.quantize(numbers.numpy(), raw_kind)
            writer.add_tensor(f"{name_in_file(name)}.weight", raw, raw_dtype=raw_kind)
            writer.add_tensor(f"{name_in_file(name)}.scale", scale)
            exact = gguf.dequantize(raw, raw_kind).astype(np.float32) * scale.astype(np.float32)
            wanted[name] = torch.from_numpy(exact).to(written)
        elif tensor.dim() == 2:
            kind_of_rows = gguf.GGMLQuantizationType.Q8_0
            rows = torch.randn(512, tensor.shape[1], generator=draw).numpy()
            writer.add_tensor(
                f"{name_in_file(name)}.weight", gguf.quantize(rows, kind_of_rows), raw_dtype=kind_of_rows
            )
        else:
            writer.add_tensor(f"{name_in_file(name)}.weight", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "converted")]) == 0
    found = load_file(tmp_path / "converted" / "model.safetensors")
    assert {found[name].dtype for name in wanted} == {written}
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
