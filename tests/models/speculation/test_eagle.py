"""EAGLE-3 heads: drafts are those of a reference, and outputs are those without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from tests.models.small_models import FAMILIES, SMALL, prompts_of
from tests.models.speculation.test_bits import PARAMS, drafting_worker, run
from tests.models.test_engine import CoreAndWorker, changed, small_kv, without_prefix_cache
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from quintet.executor.model_config.eagle import ARCHITECTURE, eagle_hf_config
from quintet.executor.speculation.drafters import DraftRows
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.speculation.head import HeadDrafter
from quintet.executor.worker import Worker
from quintet.wire.config import DraftModelConfig, EngineConfig, SpeculativeConfig
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams

HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN = 4, 2, 16, 96, SMALL["hidden_size"]
VOCAB, DRAFT_VOCAB, AUX, EPS = SMALL["vocab_size"], 120, [0, 1, 2], 1e-6
LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 64,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, seed=0)


@dataclass
class Head:
    """A random head and its reference."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def save(self, folder: Path, *, speculators: bool) -> None:
        """Save in the format of the library, or in that of the authors."""
        config, tensors = dict(self.config), dict(self.tensors)
        if speculators:
            config |= {"speculators_model_type": "eagle3", "transformer_layer_config": LAYER}
            tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
        else:
            config |= LAYER
        (folder / "config.json").write_text(json.dumps(config))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
        )

    def drafts(self, target: Any, tokens: list[int], count: int) -> list[int]:
        """Return greedy drafts after ``tokens``, computed without a cache."""
        w = self.tensors
        with torch.no_grad():
            states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            joined = torch.cat([states[layer][0] for layer in AUX], dim=1)
            if self.config.get("norm_before_fc"):
                joined = rms_norm(joined, joined.shape[1:], w["input_norm.weight"], EPS)
            known = linear(joined, w["fc.weight"])
            features = torch.cat((torch.zeros(1, HIDDEN), known[:-1]))
            table = w.get("embed_tokens.weight", target.get_input_embeddings().weight)
            drafts: list[int] = []
            for _ in range(count):
                hidden = self._layer(table[torch.tensor(tokens + drafts)], features)
                logits = linear(rms_norm(hidden[-1:], (HIDDEN,), w["norm.weight"], EPS), w["lm_head.weight"])
                drafted = int(logits.argmax())
                drafts.append(drafted + int(w["d2t"][drafted]) if "d2t" in w else drafted)
                features = torch.cat((features, hidden[-1:]))
        return drafts

    def _layer(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        w = {name.removeprefix("midlayer."): tensor for name, tensor in self.tensors.items()}

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            return rms_norm(x, (HIDDEN,), w[f"{name}.weight"], EPS)

        def heads(name: str, count: int, x: torch.Tensor) -> torch.Tensor:
            return linear(x, w[f"self_attn.{name}_proj.weight"]).view(len(x), count, HEAD_DIM).transpose(0, 1)

        normed_features = normed(features, "hidden_norm")
        residual = normed_features if self.config.get("norm_before_residual") else features
        x = torch.cat((normed(embedded, "input_layernorm"), normed_features), dim=1)
        q, k = rotated(heads("q", HEADS, x)), rotated(heads("k", KV_HEADS, x))
        attended = scaled_dot_product_attention(
            q, k, heads("v", KV_HEADS, x), is_causal=True, enable_gqa=True
        )
        x = residual + linear(attended.transpose(0, 1).flatten(1), w["self_attn.o_proj.weight"])
        y = normed(x, "post_attention_layernorm")
        gate, up = (linear(y, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + linear(silu(gate) * up, w["mlp.down_proj.weight"])


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return x ``[heads, tokens, HEAD_DIM]`` rotated by position."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def random_head(**flags: Any) -> Head:
    """Return a head. flags: ``own_embedding``, ``token_map``, and flags of its config."""
    torch.manual_seed(3)
    own_embedding, token_map = flags.pop("own_embedding", False), flags.pop("token_map", False)
    vocab = DRAFT_VOCAB if token_map else VOCAB
    kv, inputs = KV_HEADS * HEAD_DIM, len(AUX) * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (kv, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (kv, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (WIDTH, HIDDEN),
        "midlayer.mlp.up_proj": (WIDTH, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, WIDTH),
        "fc": (HIDDEN, inputs),
        "lm_head": (vocab, HIDDEN),
    } | ({"embed_tokens": (VOCAB, HIDDEN)} if own_embedding else {})
    tensors = {f"{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    for name in (*(f"midlayer.{each}" for each in norms), "norm"):
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.1 * torch.randn(inputs)
    if token_map:
        ids = torch.randperm(VOCAB)[:vocab].sort().values
        tensors["d2t"] = ids - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return Head({"draft_vocab_size": vocab, "eagle_aux_hidden_state_layer_ids": AUX, **flags}, tensors)


def with_head(config: EngineConfig, folder: Path, head: Head) -> EngineConfig:
    """Return the configuration with a saved head."""
    kv = full_layers(1, KV_HEADS, HEAD_DIM, 4, config.model.kv.block_size)
    hf_config = eagle_hf_config(json.loads((folder / "config.json").read_text()), head.tensors.keys())
    model = msgspec.structs.replace(
        config.model,
        path=str(folder),
        architecture=ARCHITECTURE,
        hf_config=json.dumps(hf_config | {"layer_name": layer_name(folder)}),
        vocab_size=head.config["draft_vocab_size"],
        kv=kv,
    )
    speculative = SpeculativeConfig(
        method="eagle3",
        num_speculative_tokens=5,
        draft=DraftModelConfig(model=model, group=0, aux_layers=AUX),
    )
    return changed(config, speculative=speculative)


def layer_name(folder: Path) -> str:
    return "layers.0" if "speculators_model_type" in (folder / "config.json").read_text() else "midlayer"


def record_drafts(worker: Worker) -> list[tuple[list[int], list[int]]]:
    """Return a list that receives the known tokens and the drafts of each proposal."""
    assert worker._speculation is not None
    drafter = worker._speculation._drafter
    assert isinstance(drafter, HeadDrafter)
    propose, found = drafter.propose, list[tuple[list[int], list[int]]]()

    def recorded(rows: DraftRows) -> list[Tokens]:
        proposals = propose(rows)
        for slot, end, drafts in zip(rows.slots, rows.num_tokens, proposals, strict=True):
            found.append((worker.tables.token_ids[slot, :end].tolist(), drafts.tolist()))
        return proposals

    drafter.propose = recorded  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("serve", [16], ids=["compiled"], indirect=True)
@pytest.mark.parametrize("speculators", [False, True], ids=["authors", "speculators"])
@pytest.mark.parametrize(
    "flags",
    [{}, {"own_embedding": True, "norm_before_residual": True}, {"token_map": True, "norm_before_fc": True}],
    ids=["plain", "own embedding", "token map"],
)
def test_drafts_are_those_of_the_reference(
    flags: dict[str, Any],
    speculators: bool,
    tmp_path_factory: pytest.TempPathFactory,
    serve: Callable[..., Any],
) -> None:
    served, folder, head = (
        serve(FAMILIES["llama-gqa-biases"](), max_model_len=96),
        tmp_path_factory.mktemp("head"),
        random_head(**flags),
    )
    head.save(folder, speculators=speculators)
    config = with_head(served.config, folder, head)
    worker = drafting_worker(config)
    found = record_drafts(worker)
    driver = CoreAndWorker(changed(config, max_num_batched_tokens=40), worker)
    for index, prompt in enumerate(prompts_of((1, 8, 50))):
        driver.admit(index + 1, prompt, GREEDY)
    driver.run()
    driver.admit(9, prompts_of((1, 8, 50))[2], GREEDY)  # after a cached prefix
    driver.run()
    proposals = [each for each in found if each[1]]
    assert len(proposals) > 40
    for tokens, drafts in (*proposals[:20:4], *proposals[20::7], proposals[-1]):
        assert drafts == head.drafts(served.reference, tokens, len(drafts))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("serve", [16], ids=["compiled"], indirect=True)
@pytest.mark.parametrize("name", PARAMS)
def test_outputs_are_those_without_drafts(
    name: str, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]
) -> None:
    served, folder, head = (
        serve(FAMILIES["qwen3"](), max_model_len=96),
        tmp_path_factory.mktemp("head"),
        random_head(token_map=True),
    )
    head.save(folder, speculators=False)
    plain = run(changed(served.config), served.core.worker, PARAMS[name])
    config = with_head(served.config, folder, head)
    worker = drafting_worker(config)
    for variant, each in {
        "together": config,
        "preemption": small_kv(config),
        "chunks": changed(config, max_num_batched_tokens=17),
        "no prefix cache": without_prefix_cache(changed(config, max_num_seqs=2)),
    }.items():
        driver = run(each, worker, PARAMS[name])
        assert driver.outputs == plain.outputs, variant
        assert driver.endings == plain.endings, variant
        assert driver.logprobs == plain.logprobs, variant
        assert driver.engine.state is not None and driver.engine.state.counters.num_draft_tokens > 0
