"""Train an EAGLE-3 head for a Llama model on the model's own answers, in CPU minutes.

    python -m bench.embedded.eagle --model smollm2 --output build/eagle3

Three parts: the served model answers prompts (`bench.embedded.chats`); its hidden states of all tokens are computed and kept in
memory; the head learns to draft. An interrupted run continues from ``training/`` in the output folder.

The head learns the model's distribution of the next token (Li et al., "EAGLE-3", 2025): from the model's hidden states, and then
from its own for further drafts, as when it is served. Prints the share of steps in which at least 1, 2, … drafts are accepted, on
greedy chats about held-out topics.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from bench.embedded.chats import BATCH_TOKENS, Chat, Texts, answered, batches, observe
from quintet.deploy.cli.convert import convert_gguf
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.embedded import default_model_path
from quintet.executor.model_config.eagle import AUX_LAYERS, default_aux_layers
from quintet.wire.model_files import is_gguf

logger = logging.getLogger("eagle")

NUM_DRAFTS, DRAFT_WEIGHT = 3, 0.8
"""Drafts in a row that are learnt, and the weight of each in the loss over that of the one before it."""

NUM_FITTED = 50_000
"""Tokens that the first weights are fitted to."""

SAVE_EVERY_S = 180
"""Seconds between two checkpoints."""


class Head(nn.Module):
    """The head, with the tensor names of its authors. Hidden states are ``[batch, tokens, hidden]``."""

    ids: torch.Tensor

    def __init__(self, model: Any, aux_layers: tuple[int, ...], ids: torch.Tensor) -> None:
        """ids: the model's ids of the tokens that the head proposes, ascending."""
        super().__init__()
        config = model.config
        hidden, self.aux_layers = config.hidden_size, aux_layers
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
        self.register_buffer("ids", ids)
        self.register_buffer("scale", torch.ones(len(aux_layers) * hidden))
        self.weights[key("norm")] = nn.Parameter(model.model.norm.weight.detach().clone())
        self.weights[key("lm_head")] = nn.Parameter(model.lm_head.weight.detach()[ids].clone())

    @torch.no_grad()
    def fit(self, texts: Texts) -> None:
        """Set the first weights: ``fc`` is the linear fit of the model's last hidden state, one token later.

        Channels of hidden states are divided by their sizes, since some are a thousand times larger than others.
        """
        places = texts.is_answer.nonzero()[:NUM_FITTED, 0]
        states = texts.states[places - 1].float()
        self.scale = states.square().mean(0).sqrt().clamp(min=1e-6)
        states /= self.scale
        wanted = texts.last[places].float() / self.weights[key("norm")]
        products = states.T @ states
        products.diagonal().add_(0.01 * len(places))
        self.weights[key("fc")].copy_(torch.linalg.solve(products, states.T @ wanted).T)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            self.weights[key(f"midlayer.{name}")].zero_()

    def forward(
        self, embedded: torch.Tensor, states: torch.Tensor, is_counted: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the logits of each draft at the counted tokens ``[counted, draft vocabulary]``, given the tokens before.

        embedded: of tokens ``[batch, tokens, hidden]``. states: the model's hidden states of the same tokens, joined.
        """
        features = F.linear(states / self.scale, self.weights[key("fc")])
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits = []
        for _ in range(NUM_DRAFTS):
            features = self._layer(embedded, later(features, 1), keys, values)
            normed = self._normed(features[is_counted], "norm")
            logits.append(F.linear(normed, self.weights[key("lm_head")]))
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
        tensors["fc.weight"] = (self.weights[key("fc")].detach() / self.scale).bfloat16()
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
        hf_config: dict[str, Any] = {
            name: getattr(config, name) for name in (*kept, "rms_norm_eps", "max_position_embeddings")
        }
        hf_config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "head_dim": self.head_dim,
            "rope_theta": self.theta,
            "dtype": "bfloat16",
            "draft_vocab_size": len(self.ids),
            AUX_LAYERS: list(self.aux_layers),
        }
        (folder / "config.json").write_text(json.dumps(hf_config, indent=1) + "\n")


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


def loss_of(head: Head, model: Any, batch: Texts) -> torch.Tensor:
    """Return the weighted mean cross-entropy of all drafts to the model's distribution, in nats.

    Counted are tokens of answers that the head can propose.
    """
    wanted_ids = batch.ids[:, 1:]
    is_counted = batch.is_answer[:, 1:] & torch.isin(wanted_ids, head.ids)
    is_counted[:, :NUM_DRAFTS] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            outputs = F.linear(batch.last[:, :-1][is_counted], model.lm_head.weight[head.ids])
            wanted = torch.softmax(outputs.float(), dim=-1)
        drafts = head(model.model.embed_tokens(batch.ids[:, :-1]), batch.states[:, :-1], is_counted)
    losses = [F.cross_entropy(draft.float(), wanted) for draft in drafts]
    weights = [DRAFT_WEIGHT**number for number in range(NUM_DRAFTS)]
    return torch.stack(losses) @ torch.tensor(weights) / sum(weights)


@torch.no_grad()
def acceptance(head: Head, model: Any, texts: Texts, lengths: list[int]) -> list[float]:
    """Return the share of steps in which the first 1, 2, … drafts are the tokens of greedy chats.

    lengths: of each chat.
    """
    accepted, count = torch.zeros(NUM_DRAFTS), 0
    starts = np.cumsum([0, *lengths[:-1]])
    for start, length in zip(starts, lengths, strict=True):
        chat = texts.window(slice(start, start + length))
        everywhere = torch.ones(1, length, dtype=torch.bool)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            drafts = head(model.model.embed_tokens(chat.ids[None]), chat.states[None], everywhere)
        equal = [head.ids[draft.argmax(-1)][:-1] == chat.ids[1:] for draft in drafts]
        num_places = length - NUM_DRAFTS  # of chains: draft number d is made one token after d - 1
        chains = torch.stack([each[number : num_places + number] for number, each in enumerate(equal)])
        begins = chat.is_answer[1 : num_places + 1]
        accepted += chains.cumprod(0)[:, begins].sum(1)
        count += int(begins.sum())
    return [round(share, 4) for share in (accepted / max(1, count)).tolist()]


def frequent_ids(chats: list[Chat], vocab_size: int, count: int) -> torch.Tensor:
    """Return the ids of the most frequent tokens of answers, ascending. Prints their share."""
    tokens = np.concatenate([chat.token_ids[chat.num_prompt :] for chat in chats])
    counts: NDArray[np.int64] = np.bincount(tokens, minlength=vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[:count])
    logger.info("%d draft tokens are %.2f %% of the answers", len(ids), 100 * counts[ids].sum() / len(tokens))
    return torch.from_numpy(ids)


def optimizers_of(head: Head, peak: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layer's matrices, and AdamW for the output layer and the norms."""
    matrices = [head.weights[key(name)] for name in head.shapes]
    rest = [weight for name, weight in head.weights.items() if name.replace("/", ".") not in head.shapes]
    return [
        torch.optim.Muon(
            [{"params": matrices, "peak": peak}], lr=peak, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [{"params": rest, "peak": 0.2 * peak}], lr=peak, betas=(0.9, 0.95), weight_decay=0.0
        ),
    ]


def train(head: Head, model: Any, texts: Texts, options: argparse.Namespace, checkpoint: Path) -> None:
    """Train the head in place, with a warm-up and a cosine; continue from the checkpoint if there is one."""
    optimizers, first = optimizers_of(head, options.peak), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first = saved["step"]
        parts: tuple[Any, ...] = (head, *optimizers)
        for part, state in zip(parts, saved["states"], strict=True):
            part.load_state_dict(state)
    saved_s, mean = time.monotonic(), math.nan
    with tqdm(total=options.steps, unit="step", mininterval=1) as bar:
        for step, batch in zip(range(options.steps), batches(texts, options.seed), strict=False):
            bar.update()
            if step < first:
                continue
            loss = loss_of(head, model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            share = 0.02 + 0.49 * (1 + math.cos(math.pi * step / options.steps))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * share * min(1.0, (step + 1) / 20)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            mean = loss.item() if math.isnan(mean) else 0.95 * mean + 0.05 * loss.item()
            bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                states = [head.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]
                torch.save({"step": step + 1, "states": states}, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)
                saved_s = time.monotonic()


def folder_of(name: str, scratch: Path) -> Path:
    """Return a model as a folder. A GGUF file becomes one in float32, in ``scratch``."""
    located = locate_model(name, with_weights=True)
    if not is_gguf(located):
        return located
    if not (scratch / "model.safetensors").exists():
        convert_gguf(located, scratch, "float32")
    return scratch


def read_options() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m bench.embedded.eagle",
    )
    parser.add_argument(
        "--model", default=str(default_model_path()), help="a Llama model, as of quintet serve"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the head")
    parser.add_argument("--answers", type=int, default=3000, help="chats to learn from")
    parser.add_argument("--answer-tokens", type=int, default=256, help="maximum tokens of an answer")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="most frequent tokens that it proposes")
    parser.add_argument("--steps", type=int, default=800, help=f"steps of {BATCH_TOKENS} tokens")
    parser.add_argument(
        "--peak", type=float, default=0.005, help="highest learning rate of the layer's matrices"
    )
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Train a head, write it, and print its acceptance and size."""
    options = read_options()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    training: Path = options.output / "training"
    chats = answered(
        options.model, training / "answers.npz", options.answers, options.answer_tokens, options.seed
    )
    model = AutoModelForCausalLM.from_pretrained(folder_of(options.model, training / "target"))
    model = model.float().eval().requires_grad_(False)
    aux_layers = default_aux_layers(model.config.num_hidden_layers)
    known = [chat for chat in chats if not chat.is_held_out]
    head = Head(model, aux_layers, frequent_ids(known, model.config.vocab_size, options.draft_vocab))
    texts = observe(model, known, aux_layers)
    head.fit(texts)
    train(head, model, texts, options, training / "checkpoint.pt")
    head.export(options.output, model)
    held_out = [chat for chat in chats if chat.is_held_out and chat.is_greedy]
    lengths = [len(chat.token_ids) for chat in held_out]
    report = {
        "steps": options.steps,
        "training_tokens": len(texts.ids),
        "held_out_acceptance": acceptance(head, model, observe(model, held_out, aux_layers), lengths),
        "parameters": sum(weight.numel() for weight in head.weights.values()),
        "megabytes": round((options.output / "model.safetensors").stat().st_size / 1e6, 1),
    }
    logger.info("%s", json.dumps(report))


if __name__ == "__main__":
    main()
