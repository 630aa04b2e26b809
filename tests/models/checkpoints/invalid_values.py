"""Invalid values, and a full run of a model folder that contains them.

A folder is resolved as by `quintet serve`; a folder that is not rejected is built and run. A number that kernels used
unchecked would end the process.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tests.models.conftest import SmallCore

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.registry import make_worker
from quintet.executor.model_config.hf_config import hf_config_of
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import DecoderSpec
from quintet.executor.models.layers.rope import Rope
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError

RUN_DIR = Path("/tmp/quintet-test")
VOCAB = 61
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "rope_theta": 10000.0,
}
INVALID_VALUES: list[Any] = [
    *(0, -1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 17, 20, 24, 31, 32, 48, 64, 65, 96, 128, 200, 255, 256, 257),
    *(320, 500, 512, 576, 577, 1000, 1024, 1025, 2048, 4096, 65_536, 100_000, 1_000_000),
    *(2**31 - 1, 2**31, 2**63, 2**64, 10**40, 10**400, -(2**63)),
    *(0.0, -0.0, 0.1, 0.3, 0.5, 0.999, 1.0, 1.5, 8.0),
    *(1e-30, 1e-300, 1e30, 1e308, -1.0, float("nan"), float("inf"), float("-inf")),
    *(True, False, None, "", "2", "silu", "default", "yarn", "x" * 500, "\x00", "\ud800"),
    *([], [1], [1.0] * 8, ["full_attention"] * 2, [None], {}, {"factor": 2.0}, {"quant_method": 7}),
]
RUNS_UP_TO = 3_000_000
"""Largest number of parameters of a model that runs in negligible time."""


def invalid_value(draw: random.Random, was: object) -> object:
    """Return a value that may be invalid; often one close to the old value."""
    if (
        isinstance(was, int | float)
        and not isinstance(was, bool)
        and abs(was) < 1e300
        and draw.random() < 0.3
    ):
        return draw.choice([was + 1, was - 1, was * 2, -was, was * 8, float(was), str(was)])
    return draw.choice(INVALID_VALUES)


def without_hf_config(folder: Path) -> Path:
    """Write a model folder without config and weights."""
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def resolved(folder: Path, block_size: int, **options: Any) -> EngineConfig:
    words = {"model": str(folder), "device": "cpu", "block_size": block_size, "threads": 1}
    limits = {"kv_cache_memory": "1MiB", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return resolve(Options(**{**words, **limits, **options}), RUN_DIR).config


def load_and_run(folder: Path, block_size: int, **options: Any) -> str | None:
    """Resolve, build and run a folder's model. Returns the one-line error; None if it computes."""
    try:
        config = resolved(folder, block_size, **options)
        family = FAMILIES.get(config.model.architecture)
        if family is not None:
            spec = family.read(hf_config_of(config.model))
            assert isinstance(spec, DecoderSpec)
            for rope in spec.ropes:
                positions = torch.tensor([0, 1, rope.reach - 1])
                rotations = Rope(rope, torch.device("cpu")).cos_sin(positions, positions + 1, torch.float32)
                assert all(torch.isfinite(part).all() for part in rotations), rope
            if spec.num_parameters > RUNS_UP_TO:
                return None
        worker = make_worker(config)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 600, str(error)
        return str(error)
    core = SmallCore(worker, block_size)
    length = min(20, config.model.max_model_len - 5, worker.num_blocks * block_size - block_size - 5)
    if length >= 1:
        request = core.add([i % config.model.vocab_size for i in range(length)], max_tokens=3)
        core.run(chunk=7)
        assert all(0 <= token < config.model.vocab_size for token in request.outputs), request.outputs
        assert len(request.outputs) == 3
    return None
