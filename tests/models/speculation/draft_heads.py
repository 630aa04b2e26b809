"""Random draft heads with a folder of their own, their references, and workers with such a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.models.small_models import SMALL
from tests.models.test_engine import changed
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from quintet.deploy.config.draft import read_head
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.speculation import speculative_config
from quintet.executor.speculation.drafters import DraftRows
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.worker import Worker
from quintet.wire.config import EngineConfig

NUM_HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN = 4, 2, 16, 96, SMALL["hidden_size"]
VOCAB, DRAFT_VOCAB, AUX, EPS = SMALL["vocab_size"], 120, [0, 1, 2], 1e-6
LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 64,
}
Tensors = dict[str, torch.Tensor]


@dataclass
class Head:
    """A random head and its reference."""

    method: str
    config: dict[str, Any]
    tensors: Tensors
    reference: Callable[[Head, Any, list[int], int], list[int]]

    def save(self, folder: Path) -> None:
        """Save the configuration and the weights."""
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors"
        )

    @torch.no_grad()
    def drafts(self, target: Any, tokens: list[int], count: int) -> list[int]:
        """Return greedy drafts after ``tokens``, computed without a cache."""
        return self.reference(self, target, tokens, count)


def random_tensors(shapes: dict[str, tuple[int, int]], **norms: int) -> Tensors:
    """Return weights of these shapes, and norms of these widths. Underscores in names of norms stand for dots."""
    tensors = {f"{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    vectors = {f"{name}.weight": 1 + 0.1 * torch.randn(width) for name, width in norms.items()}
    return tensors | vectors


def layer_shapes(prefix: str, depth: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a decoder layer. depth: width of the attention's input."""
    kv = KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, depth),
        "self_attn.k_proj": (kv, depth),
        "self_attn.v_proj": (kv, depth),
        "self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def attended(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Return the attention's output for ``x [tokens, depth]``. w: of the layer."""

    def heads(name: str, count: int) -> torch.Tensor:
        part = f"self_attn.{name}_proj"
        y = linear(x, w[f"{part}.weight"], w.get(f"{part}.bias"))
        return y.view(len(x), count, HEAD_DIM).transpose(0, 1)

    q, k, v = rotated(heads("q", NUM_HEADS)), rotated(heads("k", KV_HEADS)), heads("v", KV_HEADS)
    y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return linear(y.transpose(0, 1).flatten(1), w["self_attn.o_proj.weight"])


def fed_forward(w: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` plus the feed-forward's output. w: of the layer."""
    y = rms_norm(x, (HIDDEN,), w["post_attention_layernorm.weight"], EPS)
    gate, up = (linear(y, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return x + linear(silu(gate) * up, w["mlp.down_proj.weight"])


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return x ``[heads, tokens, HEAD_DIM]`` rotated by position."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def part_of(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors with this prefix, without it."""
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def eagle3_head(*, speculators: bool = False, **flags: Any) -> Head:
    """Return a head of EAGLE-3, in the format of its authors or of the library.

    flags: ``own_embedding``, ``token_map``, and flags of its config.
    """
    torch.manual_seed(3)
    own_embedding, token_map = flags.pop("own_embedding", False), flags.pop("token_map", False)
    vocab, inputs = DRAFT_VOCAB if token_map else VOCAB, len(AUX) * HIDDEN
    layer = "layers.0" if speculators else "midlayer"
    shapes = layer_shapes(layer, 2 * HIDDEN) | {"fc": (HIDDEN, inputs), "lm_head": (vocab, HIDDEN)}
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    widths = {f"{layer}.{each}": HIDDEN for each in norms} | {"norm": HIDDEN}
    widths |= {"input_norm": inputs} if flags.get("norm_before_fc") else {}
    tensors = random_tensors(shapes | ({"embed_tokens": (VOCAB, HIDDEN)} if own_embedding else {}), **widths)
    if token_map:
        ids = torch.randperm(VOCAB)[:vocab].sort().values
        tensors["d2t"] = ids - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    config = {"draft_vocab_size": vocab, "eagle_aux_hidden_state_layer_ids": AUX, **flags}
    config |= (
        {"speculators_model_type": "eagle3", "transformer_layer_config": LAYER} if speculators else LAYER
    )
    return Head("eagle3", config, tensors, eagle3_drafts)


def eagle3_drafts(head: Head, target: Any, tokens: list[int], count: int) -> list[int]:
    """Return drafts of a head of EAGLE-3."""
    w, flags = head.tensors, head.config
    layer = part_of(w, "midlayer.") or part_of(w, "layers.0.")
    states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    joined = torch.cat([states[number][0] for number in AUX], dim=1)
    if flags.get("norm_before_fc"):
        joined = rms_norm(joined, joined.shape[1:], w["input_norm.weight"], EPS)
    known = linear(joined, w["fc.weight"])
    features = torch.cat((torch.zeros(1, HIDDEN), known[:-1]))
    table = w.get("embed_tokens.weight", target.get_input_embeddings().weight)
    drafts: list[int] = []
    for _ in range(count):
        normed = rms_norm(features, (HIDDEN,), layer["hidden_norm.weight"], EPS)
        token = rms_norm(
            table[torch.tensor(tokens + drafts)], (HIDDEN,), layer["input_layernorm.weight"], EPS
        )
        residual = normed if flags.get("norm_before_residual") else features
        hidden = fed_forward(layer, residual + attended(layer, torch.cat((token, normed), dim=1)))
        logits = linear(rms_norm(hidden[-1:], (HIDDEN,), w["norm.weight"], EPS), w["lm_head.weight"])
        drafted = int(logits.argmax())
        drafts.append(drafted + int(w["d2t"][drafted]) if "d2t" in w else drafted)
        features = torch.cat((features, hidden[-1:]))
    return drafts


def eagle_head(*, biased: bool = False, of_vllm: bool = False, speculators: bool = False) -> Head:
    """Return a head of EAGLE, in the format of its authors, of vLLM or of the library.

    The copy of the embedding is not read. The library's config of the layer may have the layers of the served model.
    """
    torch.manual_seed(4)
    layer, fc = ("transformer", "fusion_fc") if speculators else ("layers.0", "fc")
    shapes = layer_shapes(layer, HIDDEN) | {fc: (HIDDEN, 2 * HIDDEN)}
    tensors = random_tensors(shapes, **{f"{layer}.post_attention_layernorm": HIDDEN})
    tensors["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    if biased:
        for name in (fc, *(f"{layer}.self_attn.{each}_proj" for each in "qkv")):
            tensors[f"{name}.bias"] = 0.1 * torch.randn(len(tensors[f"{name}.weight"]))
    config = {"architectures": ["LlamaForCausalLM"], **LAYER}
    if speculators:
        flags = {"layernorms": False, "fusion_bias": biased}
        config = {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"], **flags}
        config["transformer_layer_config"] = LAYER | {"num_hidden_layers": 3}
    if of_vllm:
        config = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": LAYER}
    return Head("eagle", config, tensors, eagle_drafts)


def eagle_drafts(head: Head, target: Any, tokens: list[int], count: int) -> list[int]:
    """Return drafts of a head of EAGLE."""
    w = head.tensors
    layer, fc = part_of(w, "layers.0."), part_of(w, "fc.") or part_of(w, "fusion_fc.")
    layer = layer or part_of(w, "transformer.")
    known = target.model(torch.tensor([tokens])).last_hidden_state[0]
    features = torch.cat((torch.zeros(1, HIDDEN), known[:-1]))
    drafts: list[int] = []
    for _ in range(count):
        token = target.get_input_embeddings()(torch.tensor(tokens + drafts))
        x = linear(torch.cat((token, features), dim=1), fc["weight"], fc.get("bias"))
        hidden = fed_forward(layer, x + attended(layer, x))
        drafts.append(int(target.lm_head(hidden[-1]).argmax()))
        features = torch.cat((features, hidden[-1:]))
    return drafts


def medusa_heads(*, of_vllm: bool = False) -> Head:
    """Return three Medusa heads: in the authors' format with one layer, or in that of vLLM with two.

    The authors' configuration has a wrong number of heads and no sizes, as published ones.
    """
    torch.manual_seed(5)
    numbers = [(head, layer) for head in range(3) for layer in range(2 if of_vllm else 1)]
    if of_vllm:
        shapes = {f"blocks.{head}.layers.{layer}": (HIDDEN, HIDDEN) for head, layer in numbers}
        shapes |= {f"lm_heads.{head}": (VOCAB, HIDDEN) for head in range(3)}
        sizes = {"num_heads": 3, "num_hidden_layers": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB}
        return Head("medusa", {"model_type": "medusa", **sizes}, random_tensors(shapes), medusa_drafts)
    shapes = {f"medusa_head.{head}.{layer}.linear": (HIDDEN, HIDDEN) for head, layer in numbers}
    tensors = random_tensors(shapes | {f"medusa_head.{head}.1": (VOCAB, HIDDEN) for head in range(3)})
    tensors |= {f"{name}.bias": 0.1 * torch.randn(HIDDEN) for name in shapes}
    return Head("medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors, medusa_drafts)


def medusa_drafts(head: Head, target: Any, tokens: list[int], count: int) -> list[int]:
    """Return drafts of Medusa heads. The newest token is not computed yet."""
    w, drafts = part_of(head.tensors, "medusa_head.") or head.tensors, list[int]()
    is_of_vllm = "lm_heads.0.weight" in w
    known = target.model(torch.tensor([tokens])).last_hidden_state[0, -2]
    for number in range(count):
        x = known
        for layer in range(2 if is_of_vllm else 1):
            name = f"blocks.{number}.layers.{layer}" if is_of_vllm else f"{number}.{layer}.linear"
            x = x + silu(linear(x, w[f"{name}.weight"], w.get(f"{name}.bias")))
        output = f"lm_heads.{number}" if is_of_vllm else f"{number}.1"
        drafts.append(int(linear(x, w[f"{output}.weight"]).argmax()))
    return drafts


def with_head(config: EngineConfig, folder: Path, head: Head, **more: str) -> EngineConfig:
    """Save a head, and return the configuration with it, as the server resolves it. more: keys of the flag."""
    head.save(folder)
    keys = {"method": head.method, "model": str(folder), "num_speculative_tokens": 5} | more
    options = Options(model=config.model.path, device="cpu", speculative_config=json.dumps(keys))
    target = read_facts(Path(config.model.path), generation_config="none", with_weights=True)
    facts = read_head(str(folder), options, target, config.model.dtype, config.model.kv.block_size, 0)
    return changed(config, speculative=speculative_config(options, "torch", "cpu", facts.of(config.model)))


def record_drafts(worker: Worker) -> list[tuple[list[int], list[int]]]:
    """Return a list that receives the known tokens and the drafts of each proposal."""
    assert worker._speculation is not None
    drafter = worker._speculation.drafter
    propose, found = drafter.propose, list[tuple[list[int], list[int]]]()

    def recorded(rows: DraftRows) -> list[Tokens]:
        proposals = propose(rows)
        for slot, end, drafts in zip(rows.slots, rows.num_tokens, proposals, strict=True):
            found.append((worker.tables.token_ids[slot, :end].tolist(), drafts.tolist()))
        return proposals

    drafter.propose = recorded  # type: ignore[method-assign]
    return found
