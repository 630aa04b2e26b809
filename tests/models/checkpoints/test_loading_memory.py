"""Memory of loading: anonymous memory is little more than the packed weights, for any size."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

WIDTH, FEED_FORWARD, LAYERS, TOKENS, HEADS = 2048, 5632, 8, 16_000, 16
MATRICES = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (FEED_FORWARD, WIDTH)),
    "ffn_down": (WIDTH, FEED_FORWARD),
}
"""Rows and depth of the matrices of a layer."""
NAMES = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
WORK_BYTES = 48 << 20
"""A few million numbers unpacked at a time, several copies, and the first allocations of torch."""
TRIM_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
"""The C library then keeps no freed memory: up to 40 MiB otherwise, nearly the size of a file's copy."""
LOAD = """
import sys
from pathlib import Path
from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.loading import load_model
from quintet.executor.backends.platforms.platform import open_platform
options = Options(model=sys.argv[1], dtype="bfloat16", device="cpu", max_model_len=64, kv_cache_memory="16MiB")
config = resolve(options, Path(sys.argv[2]), http=False).config
platform = open_platform(config.executor)
print("begin", flush=True)
input()
model = load_model(config, platform)
print(model.weights.reservation.memory.numel(), flush=True)
input()
"""
"""Prints before the load starts, then the size of the packed weights."""


def as_q4_k_m(folder: Path) -> Path:
    """Write a file of random blocks in the types of Q4_K_M."""
    draw, target = np.random.default_rng(0), folder / "model.gguf"
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"token{index}" for index in range(TOKENS)])
    writer.add_token_merges(["t o"])

    def add(name: str, rows: int, depth: int, kind: str = "Q4_K") -> None:
        type_ = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[type_]
        writer.add_tensor(
            f"{name}.weight", draw.integers(0, 256, (rows, depth // block * size), np.uint8), raw_dtype=type_
        )

    add("token_embd", TOKENS, WIDTH)
    add("output", TOKENS, WIDTH, "Q6_K")
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        for name, (rows, depth) in MATRICES.items():
            better = name in ("attn_v", "ffn_down") and layer % 2
            add(f"blk.{layer}.{name}", rows, depth, "Q6_K" if better else "Q4_K")
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def as_gptq(folder: Path) -> Path:
    """Write a checkpoint of random codes of 4 bits, in files of two layers each."""
    shards: list[dict[str, torch.Tensor]] = []
    for layer in range(LAYERS):
        if layer % 2 == 0:
            shards.append({})
        at = f"model.layers.{layer}"
        for name, (rows, depth) in MATRICES.items():
            its, groups = f"{at}.{NAMES[name]}", depth // 128
            shards[-1] |= {
                f"{its}.qweight": torch.randint(-(1 << 31), 1 << 31, (depth // 8, rows), dtype=torch.int32),
                f"{its}.qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
                f"{its}.scales": torch.full((groups, rows), 0.01, dtype=torch.float16),
                f"{its}.g_idx": torch.arange(depth, dtype=torch.int32) // 128,
            }
        for name in ("input_layernorm", "post_attention_layernorm"):
            shards[-1][f"{at}.{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    shards.append(
        {
            "model.embed_tokens.weight": torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16),
            "lm_head.weight": torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16),
            "model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16),
        }
    )
    places = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "tokenizer.json").write_text("{}")
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": WIDTH,
                "intermediate_size": FEED_FORWARD,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "vocab_size": TOKENS,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5,
                "torch_dtype": "bfloat16",
                "quantization_config": quantization,
            }
        )
    )
    return folder


def anonymous_bytes(process_id: int) -> int:
    """Return the anonymous memory of a process in bytes."""
    status = Path(f"/proc/{process_id}/status").read_text()
    kinds = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(kinds[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))


def peak_of_loading(model: Path, folder: Path) -> tuple[int, int]:
    """Return the additional peak memory of a process during a load, and the bytes of packed weights."""
    command = [sys.executable, "-c", LOAD, str(model), str(folder)]
    environment = {**os.environ, **TRIM_MALLOC}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        before = most = anonymous_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], 0.001)[0]:
            most = max(most, anonymous_bytes(process.pid))
        most = max(most, anonymous_bytes(process.pid))
        packed = int(process.stdout.readline())
        process.communicate("\n")
    return most - before, packed


@pytest.mark.whole
@pytest.mark.parametrize("write", [as_q4_k_m, as_gptq])
def test_loading_takes_little_more_than_the_packed_weights(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    peak, packed = peak_of_loading(write(tmp_path), tmp_path)
    assert packed > 200e6
    assert 0.98 * packed < peak < 1.02 * packed + WORK_BYTES, (peak, packed)
