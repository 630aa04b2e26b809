"""Cards and checkpoints that make no sense: each is refused in one line, or is a model that computes.

What is drawn is a function of the seed. A card goes the whole way: it is resolved as `quintet serve` does, and what is not
refused there is built with dummy weights and run. A number that kernels believed without looking would end this process.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.models.conftest import SmallCore
from tests.models.test_equal import ROWS

from quintet.deploy.resolve.build import resolve
from quintet.deploy.resolve.flags import Options
from quintet.executor.cards.card import card_of
from quintet.executor.cards.registry import FAMILIES
from quintet.executor.cards.spec import DecoderSpec
from quintet.executor.layers.rope import Rope
from quintet.executor.worker import make_torch_worker
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.number_formats import ITEM_BYTES

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
OPTIONAL: dict[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 9,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
    "partial_rotary_factor": 0.5,
    "quantization_config": None,
    "original_max_position_embeddings": 32,
    "alibi": True,
    "attention_layers": ["global", "local"],
    "attn_config": {"alibi": False, "clip_qkv": 2.0, "softmax_scale": 0.2},
    "attn_logit_softcapping": 50.0,
    "bias": True,
    "clip_qkv": 8.0,
    "do_layer_norm_before": False,
    "final_logit_softcapping": 30.0,
    "first_k_dense_replace": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "logit_scale": 0.06,
    "multi_query": False,
    "n_inner": 40,
    "new_decoder_architecture": True,
    "no_rope_layer_interval": 2,
    "num_experts_per_tok": 2,
    "num_kv_heads": 2,
    "num_ln_in_parallel_attn": 1,
    "num_local_experts": 4,
    "parallel_attn": False,
    "qk_layernorm": True,
    "query_pre_attn_scalar": 24,
    "residual_multiplier": 0.5,
    "rotary_dim": 8,
    "rotary_pct": 0.5,
    "scale_attn_by_inverse_layer_idx": True,
    "sliding_window_pattern": 2,
    "text_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
    "use_parallel_residual": False,
    "word_embed_proj_dim": 16,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2,
     "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
    {"rope_type": "yarn", "attention_factor": 1.3, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32, "short_factor": [1.0] * 8,
     "long_factor": [1.5] * 8},
]  # fmt: skip
NONSENSE: list[Any] = [
    *(0, -1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 17, 20, 24, 31, 32, 48, 64, 65, 96, 128, 200, 255, 256, 257),
    *(320, 500, 512, 576, 577, 1000, 1024, 1025, 2048, 4096, 65_536, 100_000, 1_000_000),
    *(
        2**31 - 1,
        2**31,
        2**63,
        2**64,
        10**40,
        10**400,
        -(2**63),
        0.0,
        -0.0,
        0.1,
        0.3,
        0.5,
        0.999,
        1.0,
        1.5,
        8.0,
    ),
    *(1e-30, 1e-300, 1e30, 1e308, -1.0, float("nan"), float("inf"), float("-inf")),
    *(True, False, None, "", "2", "silu", "default", "yarn", "x" * 500, "\x00", "\ud800"),
    *([], [1], [1.0] * 8, ["full_attention"] * 2, [None], {}, {"factor": 2.0}, {"quant_method": 7}),
]
SPELLED_LIKE = {
    "InternLM3ForCausalLM": ("LlamaForCausalLM", False),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", True),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", True),
}
"""Of architectures that have neither a row nor a reader in common with one that has: whose card is like theirs, and whether they
have it as their text model's."""
Cards = dict[str, list[dict[str, Any]]]
RUNS_UP_TO = 3_000_000
"""Parameters of a model that is run: the largest that take no time."""


def nonsense(draw: random.Random, was: object) -> object:
    """Return a value that may make no sense; often one near to what was there."""
    if (
        isinstance(was, int | float)
        and not isinstance(was, bool)
        and abs(was) < 1e300
        and draw.random() < 0.3
    ):
        return draw.choice([was + 1, was - 1, was * 2, -was, was * 8, float(was), str(was)])
    return draw.choice(NONSENSE)


def a_card(draw: random.Random) -> dict[str, Any]:
    """Return a card with a few wrong values, or none."""
    card = {**SMALL, "architectures": [draw.choice(sorted(FAMILIES))]}
    card |= {key: value for key, value in OPTIONAL.items() if draw.random() < 0.15}
    if draw.random() < 0.7:
        card[draw.choice(["rope_parameters", "rope_scaling"])] = dict(draw.choice(ROPES))
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        inner = [card[key] for key in ("rope_parameters", "rope_scaling") if isinstance(card.get(key), dict)]
        where = draw.choice(inner) if inner and draw.random() < 0.4 else card
        key = draw.choice(sorted(where)) if where else "rope_type"
        if draw.random() < 0.15:
            where.pop(key, None)
        else:
            where[key] = nonsense(draw, where.get(key))
    return card


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Cards:
    """Cards that are right: of every architecture at least one, with the keys that it knows."""
    anything = transformers.PretrainedConfig().to_dict()
    cards: Cards = {}
    for row in ROWS.values():
        folder = tmp_path_factory.mktemp("card")
        row.make(folder)
        card = json.loads((folder / "config.json").read_bytes()) | dict(row.card)
        own = {key: value for key, value in card.items() if key not in anything or value != anything[key]}
        cards.setdefault(card["architectures"][0], []).append(own)
    for architecture, family in FAMILIES.items():
        alike = next((each for each in cards if FAMILIES[each].read is family.read), None)
        inner, text = SPELLED_LIKE.get(architecture, (alike, False))
        for card in cards[inner] if architecture not in cards and inner is not None else ():
            spelled = {"text_config": card} if text else card
            cards.setdefault(architecture, []).append(spelled | {"architectures": [architecture]})
    return cards


def places_of(value: object) -> list[tuple[Any, Any]]:
    """Return every key of a card and of what is in it, and every index: each with what it is of."""
    if isinstance(value, dict):
        own = [(value, key) for key in value]
    elif isinstance(value, list):
        own = [(value, at) for at in range(len(value))]
    else:
        return []
    return own + [place for inner, key in own for place in places_of(inner[key])]


def a_card_of(draw: random.Random, cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one of them with a few wrong values, or none: any that it has, at any depth."""
    card: dict[str, Any] = copy.deepcopy(draw.choice(cards))
    card["dtype"] = draw.choice(["bfloat16", "float16", "float32"])
    for _ in range(draw.choice([0, 1, 1, 1, 1, 2, 3])):
        where, key = draw.choice([place for place in places_of(card) if place[1] != "architectures"])
        if draw.random() < 0.15:
            where.pop(key)
        else:
            where[key] = nonsense(draw, where[key])
    return card


def resolved(folder: Path, block_size: int, **options: Any) -> EngineConfig:
    words = {"model": str(folder), "device": "cpu", "block_size": block_size, "threads": 1}
    limits = {"kv_cache_memory": "1MiB", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return resolve(Options(**{**words, **limits, **options}), RUN_DIR).config


def try_out(folder: Path, block_size: int, **options: Any) -> str | None:
    """Resolve, build and run a folder's model. Returns the one line that refuses it; None where it computes."""
    try:
        config = resolved(folder, block_size, **options)
        family = FAMILIES.get(config.model.architecture)
        if family is not None:
            spec = family.read(card_of(config.model))
            assert isinstance(spec, DecoderSpec)
            for rope in spec.ropes:
                positions = torch.tensor([0, 1, rope.reach - 1])
                rotations = Rope(rope, torch.device("cpu")).cos_sin(positions, positions + 1, torch.float32)
                assert all(torch.isfinite(part).all() for part in rotations), rope
            if spec.num_parameters > RUNS_UP_TO:
                return None
        worker = make_torch_worker(config)
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


@pytest.fixture
def folder(tmp_path: Path, default_tokenizer: Path) -> Path:
    """A model's folder but for its card and weights."""
    shutil.copy(default_tokenizer, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return tmp_path


@pytest.fixture(scope="session")
def default_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps({"added_tokens": []}))
    return path


def fuzz_cards(
    folder: Path, seeds: Iterable[int], make: Callable[[random.Random], dict[str, Any]] = a_card
) -> tuple[int, int]:
    """Try a card of each seed; return how many were refused and how many computed."""
    refused = computed = 0
    for seed in seeds:
        draw = random.Random(seed)
        (folder / "config.json").write_text(json.dumps(make(draw)))
        try:
            said = try_out(folder, draw.choice([4, 16]), load_format="dummy")
        except Exception as error:
            error.add_note(f"seed {seed}: {(folder / 'config.json').read_text()}")
            raise
        refused, computed = refused + (said is not None), computed + (said is None)
    return refused, computed


def test_a_senseless_card_is_refused_or_computes(folder: Path) -> None:
    refused, computed = fuzz_cards(folder, range(120))
    assert refused > 30 and computed > 30


def fuzz_families(folder: Path, working: Cards, seeds: range) -> tuple[int, int]:
    """The same with cards of every family in turn."""
    names = sorted(working)
    tried = [
        fuzz_cards(folder, [seed], partial(a_card_of, cards=working[names[seed % len(names)]]))
        for seed in seeds
    ]
    return sum(refused for refused, _ in tried), sum(computed for _, computed in tried)


def test_every_architecture_has_a_card_that_computes(folder: Path, working: Cards) -> None:
    assert working.keys() == FAMILIES.keys()
    for cards in working.values():
        (folder / "config.json").write_text(json.dumps(cards[0]))
        assert try_out(folder, 16, load_format="dummy") is None, cards[0]


def test_a_senseless_card_of_any_family_is_refused_or_computes(folder: Path, working: Cards) -> None:
    refused, computed = fuzz_families(folder, working, range(len(working)))
    assert refused > 30 and computed > 30


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
MANY = 10**400


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("GPTNeoForCausalLM", {"attention_layers": [["global"]] * 3}, "words, each global or local"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [MANY, 1.0, 1.0, 1.0, 1.0]}, "a list of 5 numbers"),
        (
            "FalconH1ForCausalLM",
            {"ssm_multipliers": [float("nan"), 1.0, 1.0, 1.0, 1.0]},
            "a list of 5 numbers",
        ),
        ("Mamba2ForCausalLM", {"time_step_limit": [MANY, MANY]}, "two numbers, the smaller one first"),
        ("Mamba2ForCausalLM", {"time_step_limit": [0.0, MANY]}, None),
        ("MptForCausalLM", {"attn_config": {"clip_qkv": 1e6}}, None),
        ("GptOssForCausalLM", {"swiglu_limit": 1e6}, None),
        ("GptOssForCausalLM", {"intermediate_size": 33, **MXFP4}, "multiples of 32"),
        ("GptOssForCausalLM", {"hidden_size": 48, **MXFP4}, "multiples of 32"),
    ],
)
@pytest.mark.parametrize("block_size", [4, 16])
def test_what_was_drawn_once(
    folder: Path,
    working: Cards,
    architecture: str,
    changes: dict[str, Any],
    words: str | None,
    block_size: int,
) -> None:
    """By torch, whose blocks are smaller, and by the kernels: in fp16, which does not hold every bound."""
    card = working[architecture][0] | {"dtype": "float16"}
    for key, value in changes.items():
        card[key] = card[key] | value if key in card and isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(card))
    said = try_out(folder, block_size, load_format="dummy")
    assert said is None if words is None else said is not None and words in said


def test_what_transformers_cannot_compute_is_refused(folder: Path, working: Cards) -> None:
    """It makes the model, and finds out in the middle of a pass."""
    card = working["DeepseekV2ForCausalLM"][0] | {"architectures": ["Unknown"], "num_key_value_heads": 5}
    (folder / "config.json").write_text(json.dumps(card))
    said = try_out(folder, 16, load_format="dummy")
    assert said is not None and "trying it failed: RuntimeError" in said


@pytest.mark.parametrize("name", ["", "x" * 500])
def test_a_name_that_is_none_is_refused(folder: Path, working: Cards, name: str) -> None:
    (folder / "config.json").write_text(
        json.dumps(working["FalconForCausalLM"][0] | {"architectures": [name]})
    )
    said = try_out(folder, 16, load_format="dummy")
    assert said is not None and "names no `architectures`" in said


@pytest.mark.whole
@pytest.mark.parametrize("part", range(12))
def test_many_senseless_cards_of_all_families(folder: Path, working: Cards, part: int) -> None:
    fuzz_families(folder, working, range(10_000 + 500 * part, 10_500 + 500 * part))


def test_heads_of_one_number_compute(folder: Path) -> None:
    card = {**SMALL, "architectures": ["BioGptForCausalLM"], "head_dim": 1}
    (folder / "config.json").write_text(json.dumps(card))
    assert try_out(folder, 4, load_format="dummy") is None


def test_a_long_value_is_not_repeated_whole(folder: Path) -> None:
    card = {**SMALL, "architectures": ["LlamaForCausalLM"], "dtype": "x" * 5000}
    (folder / "config.json").write_text(json.dumps(card))
    said = try_out(folder, 4, load_format="dummy")
    assert said is not None and "x" * 20 in said


def checkpoint(folder: Path, dtype: torch.dtype) -> bytes:
    """Write a card and its weights; return the weights' file."""
    card = {**SMALL, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(card))
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**card)).to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(card))
    return (folder / "model.safetensors").read_bytes()


def spoiled(draw: random.Random, whole: bytes) -> bytes:
    """Return a safetensors file with something wrong in its header, its length, or nothing."""
    (size,) = struct.unpack("<Q", whole[:8])
    kind = draw.choice(["nothing", "entry", "entry", "entry", "names", "bytes", "cut", "length"])
    if kind == "bytes":
        changed = bytearray(whole)
        for _ in range(draw.choice([1, 3, 20])):
            changed[draw.randrange(8 + size)] = draw.randrange(256)
        return bytes(changed)
    if kind == "cut":
        return whole[: draw.randrange(len(whole))]
    if kind == "length":
        return (
            struct.pack("<Q", draw.choice([0, 1, 2, size - 1, size + 1, len(whole), 1 << 40, (1 << 64) - 1]))
            + whole[8:]
        )
    header, tensors = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = draw.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    if kind == "names":
        header.pop(name)
        if draw.random() < 0.6:
            header[draw.choice(["lm_head.weight", "x", "", "\ud800", name + ".1", "__metadata__"])] = entry
    elif kind == "entry":
        key = draw.choice(["dtype", "dtype", "shape", "shape", "data_offsets", "all"])
        if key == "dtype":
            entry[key] = draw.choice([*ITEM_BYTES, "F4", "bf16", *NONSENSE])
        elif key == "all":
            header[name] = draw.choice(NONSENSE)
        elif draw.random() < 0.5:
            entry[key] = draw.choice([entry[key][::-1], [*entry[key], 1], entry[key][:1], [0, 0], *NONSENSE])
        else:
            at = draw.randrange(len(entry[key]))
            entry[key][at] = nonsense(draw, entry[key][at])
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + tensors


def fuzz_checkpoints(folder: Path, seeds: range) -> tuple[int, int]:
    """Try a checkpoint of each seed; return how many were refused and how many computed."""
    refused = computed = 0
    wholes = [checkpoint(folder, dtype) for dtype in (torch.bfloat16, torch.float32)]
    for seed in seeds:
        draw = random.Random(seed)
        path = folder / "model.safetensors"
        path.write_bytes(spoiled(draw, draw.choice(wholes)))
        index = folder / "model.safetensors.index.json"
        index.unlink(missing_ok=True)
        if draw.random() < 0.2:
            names = draw.choice(
                [
                    {"x": path.name},
                    {"x": "absent"},
                    {"x": "../" + path.name},
                    *({"x": one} for one in NONSENSE),
                ]
            )
            index.write_text(
                json.dumps(
                    draw.choice([{"weight_map": names}, {"weight_map": names}, {}, draw.choice(NONSENSE)])
                )
            )
        try:
            said = try_out(folder, draw.choice([4, 16]), quantization=draw.choice(["none", "none", "int8"]))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        refused, computed = refused + (said is not None), computed + (said is None)
    return refused, computed


def test_a_senseless_checkpoint_is_refused_or_computes(folder: Path) -> None:
    refused, computed = fuzz_checkpoints(folder, range(100))
    assert refused > 40 and computed > 10


@pytest.mark.whole
@pytest.mark.parametrize("part", range(4))
def test_many_senseless_checkpoints(folder: Path, part: int) -> None:
    fuzz_checkpoints(folder, range(1000 + 500 * part, 1500 + 500 * part))


@pytest.mark.whole
@pytest.mark.parametrize("part", range(8))
def test_many_senseless_cards(folder: Path, part: int) -> None:
    fuzz_cards(folder, range(1000 + 500 * part, 1500 + 500 * part))
