"""`kill -9` with drafts of each role: texts, features and cached outputs are lost, and all responses stay the same."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.chaos.streams import Run, StreamRequest, random_requests, run_requests
from safetensors.torch import load_file, save_file

from quintet.deploy.embedded import default_model_path
from tests.chaos.test_kills import COMMON, assert_same, kill
from tests.processes.server import serve

pytestmark = pytest.mark.whole
"""`tests.models.speculation` tests outputs with and without drafts, without a server."""

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "suffix": {"suffix_decoding_max_spec_factor": 4},
    "mtp": {"num_speculative_tokens": 3},
    "draft_model": {"num_speculative_tokens": 3},
}
DRAFTING = "tests.chaos.longest_drafts"
FLAGS = (*COMMON, "--kv-cache-memory", "12MiB")
"""KV memory of at least one request of maximum length."""
FIRST, LAYER, NUM_LAYERS = "model.layers.0.", "model.mtp_layers.0", 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_mimo(tmp_path_factory.mktemp("model"))


def write_mimo(folder: Path) -> str:
    """Write a model of MiMo with the embedded model's first layer, and the same one as prediction layer; return its path.

    Further layers add zeros, so that drafts take less time than they save.
    """
    shutil.copytree(default_model_path(), folder, dirs_exist_ok=True)
    path, config_path = folder / "model.safetensors", folder / "config.json"
    config, whole = json.loads(config_path.read_bytes()), load_file(path)
    changes = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config_path.write_text(json.dumps(config | changes | {"num_hidden_layers": NUM_LAYERS}))
    first = {name.removeprefix(FIRST): each for name, each in whole.items() if name.startswith(FIRST)}
    for name in [f"self_attn.{each}_proj" for each in "qkv"]:
        first[f"{name}.bias"] = torch.zeros_like(first[f"{name}.weight"][:, 0])
    embedding, norm = whole["model.embed_tokens.weight"], whole["model.norm.weight"]
    scale, identity = embedding.float().square().mean().sqrt(), torch.eye(len(norm), dtype=norm.dtype)
    tensors = {name: each for name, each in whole.items() if ".layers." not in name} | {
        f"{LAYER}.token_layernorm.weight": torch.ones_like(norm) * scale,
        f"{LAYER}.hidden_layernorm.weight": torch.ones_like(norm),
        f"{LAYER}.final_layernorm.weight": norm.clone(),
        f"{LAYER}.input_proj.weight": torch.cat((torch.zeros_like(identity), identity), dim=1),
    }
    for prefix in [f"{LAYER}.", *(f"model.layers.{index}." for index in range(NUM_LAYERS))]:
        for name, each in first.items():
            adds_zeros = prefix not in (f"{LAYER}.", FIRST) and name.endswith(
                ("o_proj.weight", "down_proj.weight")
            )
            tensors[prefix + name] = torch.zeros_like(each) if adds_zeros else each.clone()
    save_file(tensors, path)
    return str(folder)


def write_first_layer(folder: Path) -> str:
    """Write a draft model of it: the embedded model with its first layer only; return its path."""
    shutil.copytree(default_model_path(), folder, dirs_exist_ok=True)
    path, config_path = folder / "model.safetensors", folder / "config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_bytes()) | {"num_hidden_layers": 1}))
    tensors = load_file(path)
    save_file({name: tensors[name] for name in tensors if ".layers." not in name or FIRST in name}, path)
    return str(folder)


def draft_flags(method: str, folder: Path) -> tuple[str, str]:
    """Return the flag of a method for the model of `write_mimo`. folder: for a draft model."""
    keys = {"method": method} | METHODS[method]
    if method == "draft_model":
        keys["model"] = write_first_layer(folder)
    return "--speculative-config", json.dumps(keys)


@pytest.fixture(scope="module")
def requests() -> list[StreamRequest]:
    return random_requests(4, 12, (60, 120))


@pytest.fixture(scope="module")
def reference(model: str, requests: list[StreamRequest]) -> Run:
    with serve(model, *FLAGS) as plain:
        run = asyncio.run(run_requests(plain.url, requests))
    assert all(result.status == 200 and result.is_done and not result.error for result in run.results)
    return run


@pytest.mark.parametrize("method", METHODS)
def test_kills_with_drafts_keep_all_bytes(
    method: str, model: str, requests: list[StreamRequest], reference: Run, tmp_path: Path
) -> None:
    with serve(model, *FLAGS, *draft_flags(method, tmp_path / "draft"), program=DRAFTING) as server:
        for role in (None, "executor", "frontend", "core", "tokenizer", "executor", "detokenizer"):

            async def disturb(role: str | None = role) -> None:
                if role is not None:
                    kill(server, role)

            assert_same(server, reference, asyncio.run(run_requests(server.url, requests, disturb)), requests)
            server.await_metrics()
            if role is None:  # a new core counts from zero, and few tokens may be left
                assert server.gauge("quintet:spec_decode_num_draft_tokens_total") > 0
            if method == "suffix":
                assert server.gauge("quintet:spec_decode_cached_requests") > 0
                assert server.gauge("quintet:spec_decode_num_accepted_tokens_total") > 0
