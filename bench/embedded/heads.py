"""Train a draft head for a Llama model on the model's own answers, in CPU minutes.

    python -m bench.embedded.heads --model smollm2 --output build/eagle3
    python -m bench.embedded.heads --kind mtp --model smollm2 --output build/mtp --chats build/eagle3/training/answers.npz

Three parts: the served model answers prompts (`bench.embedded.chats`); its hidden states of all tokens are computed and kept in
memory; the head learns to draft. An interrupted run continues from ``training/`` in the output folder.

The head learns the model's distribution of the next token: from the model's hidden states, and then from its own for further
drafts, as when it is served. Prints the share of steps in which at least 1, 2, … drafts are accepted, on greedy chats about
held-out topics. --kind mtp writes a whole checkpoint: the model and a multi-token prediction layer, as of MiMo 7B.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from bench.embedded.chats import BATCH_TOKENS, Chat, Texts, answered, batches, observe
from bench.embedded.draft_layer import OutputLayer
from bench.embedded.eagle import EagleHead
from bench.embedded.mtp import MtpHead, check_is_plain
from quintet.deploy.cli.convert import convert_gguf
from quintet.deploy.config.model.source import locate_model
from quintet.deploy.embedded import default_model_path
from quintet.wire.model_files import is_gguf

logger = logging.getLogger("heads")

NUM_DRAFTS, DRAFT_WEIGHT = 3, 0.8
"""Drafts in a row that are learnt, and the weight of each in the loss over that of the one before it."""

SAVE_EVERY_S = 180
"""Seconds between two checkpoints."""


class Head(Protocol):
    """A draft head in training. Hidden states are ``[batch, tokens, hidden]``."""

    ids: torch.Tensor
    """Ids of the most frequent tokens, ascending."""
    aux_layers: tuple[int, ...]
    """Layers of the model after which it reads hidden states; none: after the last norm."""

    def fit(self, model: Any, texts: Texts) -> None:
        """Set the first weights."""

    def __call__(
        self, embedded: torch.Tensor, states: torch.Tensor, is_counted: torch.Tensor, num_drafts: int
    ) -> list[torch.Tensor]:
        """Return normed hidden states of each draft at the counted tokens ``[counted, hidden]``, given the tokens before.

        embedded: of tokens ``[batch, tokens, hidden]``. states: the model's hidden states of the same tokens, joined.
        """

    def trained_output(self, model: Any) -> OutputLayer:
        """Return the output layer of a training step."""

    def served_output(self, model: Any) -> OutputLayer:
        """Return the output layer that drafts are drawn from."""

    def export(self, folder: Path, model: Any) -> None:
        """Write what `quintet serve` loads."""


KINDS: dict[str, Callable[[Any, torch.Tensor], Any]] = {"eagle3": EagleHead, "mtp": MtpHead}
"""Constructors of heads, given the model and the ids of the most frequent tokens."""


def loss_of(head: Head, model: Any, batch: Texts) -> torch.Tensor:
    """Return the weighted mean cross-entropy of all drafts to the model's distribution, in nats.

    Counted are tokens of answers that are among the most frequent.
    """
    wanted_ids = batch.ids[:, 1:]
    is_counted = batch.is_answer[:, 1:] & torch.isin(wanted_ids, head.ids)
    is_counted[:, :NUM_DRAFTS] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = head.trained_output(model)
        with torch.no_grad():
            known = F.linear(batch.last[:, :-1][is_counted], model.lm_head.weight[output.ids], output.bias)
            wanted = torch.softmax(known.float(), dim=-1)
        embedded = model.model.embed_tokens(batch.ids[:, :-1])
        drafts = head(embedded, batch.states[:, :-1], is_counted, NUM_DRAFTS)
        logits = [output.logits(draft) for draft in drafts]
    losses = [F.cross_entropy(each.float(), wanted) for each in logits]
    weights = [DRAFT_WEIGHT**number for number in range(NUM_DRAFTS)]
    return torch.stack(losses) @ torch.tensor(weights) / sum(weights)


@torch.no_grad()
def drafts_of(head: Head, model: Any, ids: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
    """Return the greedy drafts after each token of a text, of each number in a chain.

    The tokens before draft ``d`` are those of the text: it is what the head proposes if drafts before it are accepted.

    ids: ``[tokens]``. states: the model's, ``[tokens, …]``.
    """
    output, everywhere = head.served_output(model), torch.ones(1, len(ids), dtype=torch.bool)
    normed = head(model.model.embed_tokens(ids[None]), states[None], everywhere, NUM_DRAFTS)
    return [output.ids[output.logits(each).argmax(-1)] for each in normed]


@torch.no_grad()
def acceptance(head: Head, model: Any, texts: Texts, lengths: list[int]) -> list[float]:
    """Return the share of steps in which the first 1, 2, … drafts are the tokens of greedy chats.

    lengths: of each chat.
    """
    accepted, count = torch.zeros(NUM_DRAFTS), 0
    starts = np.cumsum([0, *lengths[:-1]])
    for start, length in zip(starts, lengths, strict=True):
        chat = texts.window(slice(start, start + length))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            drafts = drafts_of(head, model, chat.ids, chat.states)
        equal = [draft[:-1] == chat.ids[1:] for draft in drafts]
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


def optimizers_of(head: nn.Module, peak: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layer's matrices, and AdamW for an output layer and the norms."""
    matrices = [
        part.weight
        for name, part in head.named_modules()
        if isinstance(part, nn.Linear) and name != "lm_head"
    ]
    known = {id(each) for each in matrices}
    rest = [each for each in head.parameters() if id(each) not in known]
    return [
        torch.optim.Muon(
            [{"params": matrices, "peak": peak}], lr=peak, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [{"params": rest, "peak": 0.2 * peak}], lr=peak, betas=(0.9, 0.95), weight_decay=0.0
        ),
    ]


def train(head: Any, model: Any, texts: Texts, options: argparse.Namespace, checkpoint: Path) -> None:
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
        prog="python -m bench.embedded.heads",
    )
    parser.add_argument("--kind", choices=KINDS, default="eagle3")
    parser.add_argument(
        "--model", default=str(default_model_path()), help="a Llama model, as of quintet serve"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the head")
    parser.add_argument(
        "--chats", type=Path, help="file of answers, perhaps of another run (default: in --output)"
    )
    parser.add_argument(
        "--answers", type=int, default=3000, help="chats to learn from, with prompts of templates"
    )
    parser.add_argument(
        "--own", type=int, default=0, help="further chats, with prompts that the model writes"
    )
    parser.add_argument("--answer-tokens", type=int, default=256, help="maximum tokens of an answer")
    parser.add_argument(
        "--draft-vocab",
        type=int,
        default=4096,
        help="most frequent tokens: those that an EAGLE-3 head proposes, and of an MTP layer's loss",
    )
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
    training.mkdir(parents=True, exist_ok=True)
    file = options.chats or training / "answers.npz"
    chats = answered(options.model, file, options.answers, options.own, options.answer_tokens, options.seed)
    model = AutoModelForCausalLM.from_pretrained(folder_of(options.model, training / "target"))
    if options.kind == "mtp":
        check_is_plain(model.config)
    model = model.float().eval().requires_grad_(False)
    known = [chat for chat in chats if not chat.is_held_out]
    head = KINDS[options.kind](model, frequent_ids(known, model.config.vocab_size, options.draft_vocab))
    texts = observe(model, known, head.aux_layers)
    head.fit(model, texts)
    train(head, model, texts, options, training / "checkpoint.pt")
    head.export(options.output, model)
    held_out = [chat for chat in chats if chat.is_held_out and chat.is_greedy]
    lengths = [len(chat.token_ids) for chat in held_out]
    report = {
        "steps": options.steps,
        "training_tokens": len(texts.ids),
        "held_out_acceptance": acceptance(head, model, observe(model, held_out, head.aux_layers), lengths),
        "parameters": sum(weight.numel() for weight in head.parameters()),
        "megabytes": round((options.output / "model.safetensors").stat().st_size / 1e6, 1),
    }
    logger.info("%s", json.dumps(report))


if __name__ == "__main__":
    main()
