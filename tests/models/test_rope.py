"""Every RoPE scaling kind, within and beyond the original context, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.rope import rope_spec
from quintet.executor.models.layers.rope import Rope
from quintet.wire.errors import ConfigError

HEAD_DIM = 16
ORIGINAL = 32

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.3,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
    },
}


def config_of(kind: str) -> transformers.LlamaConfig:
    """A tiny Llama with the original context length where the kind counts from it, else four times that."""
    parameters = {"rope_theta": 10000.0, **KINDS[kind]}
    return transformers.LlamaConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=ORIGINAL if kind == "dynamic" else 4 * ORIGINAL,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_transformers(kind: str) -> None:
    config = config_of(kind)
    spec = rope_spec(HfConfig(json.loads(config.to_json_string()), "config.json"), HEAD_DIM, 2048)
    for length in (ORIGINAL, 3 * ORIGINAL):
        positions = torch.arange(length)
        cos, sin = Rope(spec, torch.device("cpu")).cos_sin(
            positions, torch.full((length,), length), torch.float32
        )
        if spec.kind == "default":
            frequencies, scale = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[spec.kind](config, torch.device("cpu"), seq_len=length)
        angles = positions.float()[:, None] * frequencies
        torch.testing.assert_close(cos[:, 0, : HEAD_DIM // 2], angles.cos() * scale, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sin[:, 0, HEAD_DIM // 2 :], angles.sin() * scale, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def generated(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation of one prompt by transformers' own loop, which caches rotated keys."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    continuation: list[int] = out[0, len(prompt) :].tolist()
    return continuation


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers_across_the_original_context(
    kind: str, serve: Callable[..., Any]
) -> None:
    """Prompts shorter than, crossing during output, and longer than the original context, in chunks and whole.

    transformers runs one prompt at a time, because it rotates a batch by its longest member. The longest comes first,
    because its dynamic kind keeps the longest length until a prompt fits the original context.
    """
    served = serve(config_of(kind))
    prompts = [[(7 * i + 3 * n) % 211 for i in range(n)] for n in (ORIGINAL + 17, ORIGINAL - 9, 5)]
    expected = [generated(served.reference, prompt, 32) for prompt in prompts]
    for limits in ({}, {"chunk": 11}):
        requests = [served.core.add(prompt) for prompt in prompts]
        served.core.run(**limits)
        assert [request.outputs for request in requests] == expected


def test_legacy_rope_keys_are_read() -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}}
    ours = [rope_spec(HfConfig(hf_config, "config.json"), HEAD_DIM, 64) for hf_config in (old, new)]
    frequencies = [
        Rope(spec, torch.device("cpu")).cos_sin(torch.arange(9), None, torch.float32) for spec in ours
    ]
    assert torch.equal(frequencies[0][0], frequencies[1][0])


def test_partial_rotation_covers_the_first_dimensions() -> None:
    spec = rope_spec(HfConfig({"partial_rotary_factor": 0.5}, "config.json"), HEAD_DIM, 64)
    cos, _ = Rope(spec, torch.device("cpu")).cos_sin(torch.arange(3), None, torch.float32)
    assert cos.shape == (3, 1, HEAD_DIM // 2)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"rope_type": "spiral"}, "spiral"), ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor")],
)
def test_invalid_settings_are_named(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rope_spec(HfConfig({"rope_parameters": parameters}, "config.json"), HEAD_DIM, 64)
