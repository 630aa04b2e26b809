"""Train an EAGLE-3 head for a Llama model on the text of `bench.embedded.corpus`, in CPU minutes.

    python -m bench.embedded.eagle --output build/eagle3
    python -m bench.embedded.eagle --model FOLDER --draft-vocab 8192 --steps 300 --output build/eagle3

The head learns the model's distribution of the next token (Li et al., "EAGLE-3", 2025): from the model's hidden states, and then
from its own for further drafts, as when it is served. Prints the share of held-out tokens that the head and the model choose
alike, by the number of the draft.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from bench.embedded.corpus import Document, Kind, build_corpus
from bench.embedded.fit import CONTEXT, Tokens, windows
from quintet.deploy.embedded import default_model_path
from quintet.executor.model_config.eagle import AUX_LAYERS, default_aux_layers

logger = logging.getLogger("eagle")

NUM_DRAFTS, DRAFT_WEIGHT = 4, 0.8
"""Drafts in a row that are learnt, and the weight of each in the loss over that of the one before it."""


class Head(nn.Module):
    """The head, with the tensor names of its authors. Hidden states are ``[batch, tokens, hidden]``."""

    def __init__(self, model: Any, aux_layers: tuple[int, ...], ids: torch.Tensor) -> None:
        """ids: the model's ids of the tokens that the head proposes, ascending."""
        super().__init__()
        config = model.config
        hidden, self.aux_layers, self.ids = config.hidden_size, aux_layers, ids
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or hidden // self.num_heads
        self.theta, self.eps = float(config.rope_parameters["rope_theta"]), config.rms_norm_eps
        kv = self.num_kv_heads * self.head_dim
        self.shapes = {
            "midlayer.self_attn.q_proj": (self.num_heads * self.head_dim, 2 * hidden),
            "midlayer.self_attn.k_proj": (kv, 2 * hidden),
            "midlayer.self_attn.v_proj": (kv, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, self.num_heads * self.head_dim),
            "midlayer.mlp.gate_proj": (config.intermediate_size, hidden),
            "midlayer.mlp.up_proj": (config.intermediate_size, hidden),
            "midlayer.mlp.down_proj": (hidden, config.intermediate_size),
            "fc": (hidden, len(aux_layers) * hidden),
        }
        self.weights = nn.ParameterDict(
            {
                key(name): nn.Parameter(torch.randn(shape) * 0.5 * shape[1] ** -0.5)
                for name, shape in self.shapes.items()
            }
        )
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
        self.weights.update({key(name): nn.Parameter(torch.ones(hidden)) for name in norms})
        self.weights[key("norm")] = nn.Parameter(model.model.norm.weight.detach().clone())
        self.weights[key("lm_head")] = nn.Parameter(model.lm_head.weight.detach()[ids].clone())

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of each draft ``[batch, tokens, draft vocabulary]``, given the tokens before it.

        embedded: of tokens. states: the model's hidden states of the same tokens, joined.
        """
        features = F.linear(states, self.weights[key("fc")])
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits = []
        for _ in range(NUM_DRAFTS):
            hidden = self._layer(embedded, later(features, 1), keys, values)
            logits.append(F.linear(self._normed(hidden, "norm"), self.weights[key("lm_head")]))
            features = hidden
        return logits

    def _layer(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """Return the layer's hidden states for the next draft; append its keys and values to those of earlier drafts."""
        x = torch.cat(
            (
                self._normed(embedded, "midlayer.input_layernorm"),
                self._normed(features, "midlayer.hidden_norm"),
            ),
            -1,
        )
        q = rotated(self._heads(x, "q", self.num_heads), self.theta)
        repeats = self.num_heads // self.num_kv_heads
        keys.append(rotated(self._heads(x, "k", self.num_kv_heads), self.theta).repeat_interleave(repeats, 1))
        values.append(self._heads(x, "v", self.num_kv_heads).repeat_interleave(repeats, 1))
        attended = drafted_attention(q, keys, values).transpose(1, 2).flatten(2)
        x = features + F.linear(attended, self.weights[key("midlayer.self_attn.o_proj")])
        y = self._normed(x, "midlayer.post_attention_layernorm")
        gate, up = (F.linear(y, self.weights[key(f"midlayer.mlp.{name}_proj")]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, self.weights[key("midlayer.mlp.down_proj")])

    def _heads(self, x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        y = F.linear(x, self.weights[key(f"midlayer.self_attn.{name}_proj")])
        heads: torch.Tensor = y.unflatten(-1, (count, self.head_dim)).transpose(1, 2)
        return heads

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[key(name)], self.eps)

    def export(self, folder: Path, model: Any) -> None:
        """Write the head as its authors do, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        config, vocab_size = model.config, model.config.vocab_size
        tensors = {
            f"{name.replace('/', '.')}.weight": weight.detach().bfloat16().contiguous()
            for name, weight in self.weights.items()
        }
        if len(self.ids) < vocab_size:
            tensors["d2t"] = self.ids - torch.arange(len(self.ids))
            tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, self.ids, True)
        save_file(tensors, folder / "model.safetensors")
        kept = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "hidden_act",
        )
        card: dict[str, Any] = {
            name: getattr(config, name) for name in (*kept, "rms_norm_eps", "max_position_embeddings")
        }
        card |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "head_dim": self.head_dim,
            "rope_theta": self.theta,
            "dtype": "bfloat16",
            "draft_vocab_size": len(self.ids),
            AUX_LAYERS: list(self.aux_layers),
        }
        (folder / "config.json").write_text(json.dumps(card, indent=1) + "\n")


def key(name: str) -> str:
    """Return a tensor's name in a dictionary of parameters, which allows no dots."""
    return name.replace(".", "/")


def later(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return x ``[batch, tokens, …]`` moved to later tokens, with zeros before them."""
    return F.pad(x, (0, 0, count, 0))[:, : x.shape[1]]


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Return x ``[batch, heads, tokens, width]`` rotated by position."""
    width = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(x.shape[2]).float(), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def drafted_attention(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Return the attention of the newest draft: to the model's tokens, then to one key of each earlier draft and its own.

    The query of draft ``d`` at position ``i`` sees keys of the first draft up to ``i - d``, and the key of draft ``m`` at
    ``i - d + m``: keys of the first draft are from hidden states of the model.
    """
    num_tokens, newest = q.shape[2], len(keys) - 1
    scores = q @ keys[0].transpose(-1, -2)
    seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(-newest)
    columns = [scores.masked_fill(~seen, -math.inf)]
    shifted = [
        F.pad(each, (0, 0, newest - draft, 0))[:, :, :num_tokens] for draft, each in enumerate(keys) if draft
    ]
    columns += [(q * each).sum(-1, keepdim=True) for each in shifted]
    weights = torch.softmax(torch.cat(columns, -1) * q.shape[-1] ** -0.5, dim=-1)
    total = weights[..., :num_tokens] @ values[0]
    for draft in range(1, newest + 1):
        moved = F.pad(values[draft], (0, 0, newest - draft, 0))[:, :, :num_tokens]
        total = total + weights[..., num_tokens + draft - 1, None] * moved
    return total


def observed(model: Any, ids: torch.Tensor, aux_layers: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return the model's embeddings, its joined hidden states, and its logits of ids ``[batch, tokens]``."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.model(ids, output_hidden_states=True, use_cache=False)
        logits = model.lm_head(output.last_hidden_state)
    states = torch.cat([output.hidden_states[layer] for layer in aux_layers], dim=-1)
    return output.hidden_states[0].float(), states.float(), logits.float()


def loss_of(head: Head, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean cross-entropy of all drafts to the model's distribution, in nats."""
    embedded, states, logits = observed(model, ids, head.aux_layers)
    wanted = torch.softmax(logits[..., head.ids], dim=-1)
    total = torch.zeros(())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drafts = head(embedded, states)
    for number, draft in enumerate(drafts):
        losses = -(wanted * torch.log_softmax(draft.float(), dim=-1)).sum(-1)
        total = total + DRAFT_WEIGHT**number * losses[:, number:].mean()
    return total / sum(DRAFT_WEIGHT**number for number in range(NUM_DRAFTS))


@torch.inference_mode()
def agreement(head: Head, model: Any, documents: list[Tokens]) -> list[float]:
    """Return the share of tokens that the head and the model choose alike, for each draft."""
    equal, count = np.zeros(NUM_DRAFTS), 0
    for tokens in documents:
        for start in range(0, len(tokens) - CONTEXT, CONTEXT):
            ids = torch.from_numpy(tokens[None, start : start + CONTEXT].astype(np.int64))
            embedded, states, logits = observed(model, ids, head.aux_layers)
            chosen = logits.argmax(-1)
            for number, draft in enumerate(head(embedded, states)):
                equal[number] += int((head.ids[draft.argmax(-1)] == chosen)[:, NUM_DRAFTS:].sum())
            count += ids.shape[1] - NUM_DRAFTS
    return [round(float(each), 4) for each in equal / max(1, count)]


def frequent_ids(encoded: list[Tokens], vocab_size: int, count: int) -> torch.Tensor:
    """Return the ids of the most frequent tokens, ascending."""
    counts: NDArray[np.int64] = np.bincount(np.concatenate(encoded), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def encode(tokenizer: Tokenizer, documents: list[Document]) -> list[Tokens]:
    """Return the tokens of each document. Ids above 65,535 are not supported."""
    return [np.array(each.ids, np.uint16) for each in tokenizer.encode_batch([d.text for d in documents])]


def train(head: Head, model: Any, encoded: list[Tokens], options: argparse.Namespace) -> None:
    """Train the head in place, with a warm-up and a cosine."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.peak, betas=(0.9, 0.95), weight_decay=0.01)
    batches = windows(encoded, CONTEXT, options.batch_tokens, options.seed)
    with tqdm(total=options.steps, unit="step", mininterval=1) as bar:
        for step in range(options.steps):
            loss = loss_of(head, model, torch.from_numpy(next(batches))[:, :-1])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            share = min(1.0, (step + 1) / 20) * (
                0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / options.steps))
            )
            optimizer.param_groups[0]["lr"] = options.peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def main() -> None:
    """Train a head, write it, and print how often it agrees with the model."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m bench.embedded.eagle",
    )
    parser.add_argument("--model", type=Path, default=default_model_path(), help="folder of a Llama model")
    parser.add_argument("--output", type=Path, required=True, help="folder for the head")
    parser.add_argument(
        "--draft-vocab", type=int, default=0, help="most frequent tokens that it proposes; 0: all"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--peak", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model).float().eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    documents = build_corpus(options.seed)
    encoded = encode(tokenizer, [document for document in documents if not document.held_out])
    vocab_size = model.config.vocab_size
    ids = frequent_ids(encoded, vocab_size, options.draft_vocab or vocab_size)
    head = Head(model, default_aux_layers(model.config.num_hidden_layers), ids)
    train(head, model, encoded, options)
    head.export(options.output, model)
    held_out = [document for document in documents if document.held_out and document.kind is Kind.LIBRARY]
    shares = agreement(head, model, encode(tokenizer, held_out))
    logger.info("%s", json.dumps({"steps": options.steps, "greedy_agreement": shares}))


if __name__ == "__main__":
    main()
