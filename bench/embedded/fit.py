"""Training loop of a Llama on a CPU: batches of documents, loss, optimizers, learning rate and a resumable checkpoint."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import LlamaForCausalLM

Tokens = NDArray[np.uint16]

CONTEXT = 256
LONG_CONTEXT = 2048
SHORT_SHARE = 0.92
"""Share of the cosine schedule before the first long window."""
NUM_LEAD_STEPS = 12
"""Steps with long windows before their learning rate warms up: the optimizers' averages adapt to their gradients."""
LOSS_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate per step. Numbers of steps are fixed, so a slower machine repeats the same run.

    The rate warms up and follows a cosine. Steps with long windows have a second, smaller warm-up: a model trained only on short
    windows fails beyond their length.
    """

    num_cosine_steps: int
    num_long_steps: int
    batch_tokens: int
    peak_matrices: float
    peak_embedding: float
    num_warmup_steps: int = 60
    num_long_warmup_steps: int = 20
    long_share: float = 0.3
    final_share: float = 0.02

    @property
    def num_short_steps(self) -> int:
        """Steps before the first long window."""
        return round(self.num_cosine_steps * SHORT_SHARE)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.num_short_steps + NUM_LEAD_STEPS + self.num_long_steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, as a share of the peak."""
        rise = step - self.num_short_steps - NUM_LEAD_STEPS
        if rise >= 0:
            up = (rise + 1) / self.num_long_warmup_steps
            down = (self.num_long_steps - rise) / max(1, self.num_long_steps - self.num_long_warmup_steps)
            return self.final_share + (self.long_share - self.final_share) * max(0.0, min(up, down, 1.0))
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        progress = (step - self.num_warmup_steps) / max(1, self.num_cosine_steps - self.num_warmup_steps)
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress))


def fit(
    model: LlamaForCausalLM, encoded: list[Tokens], schedule: Schedule, seed: int, checkpoint: Path | None
) -> None:
    """Train a model in place. Resume from the checkpoint if its file exists; save it every five minutes."""
    optimizers = build_optimizers(model, schedule)
    first_step = load_checkpoint(checkpoint, model, optimizers) if checkpoint and checkpoint.exists() else 0
    saved_at = time.monotonic()
    mean_loss: float | None = None
    model.train()
    with tqdm(total=schedule.num_steps, unit="step", mininterval=1) as bar:
        for step, batch in enumerate(batches(encoded, schedule, seed)):
            bar.update()
            if step < first_step:
                continue
            loss = accumulate_gradients(model, torch.from_numpy(batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * schedule.rate(step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            mean_loss = loss if mean_loss is None else mean_loss + 0.05 * (loss - mean_loss)
            bar.set_postfix(loss=f"{mean_loss:.3f}", refresh=False)
            if checkpoint and time.monotonic() - saved_at > 300:
                save_checkpoint(checkpoint, model, optimizers, step + 1)
                saved_at = time.monotonic()


def batches(encoded: list[Tokens], schedule: Schedule, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the batch ``[batch, context + 1]`` of each step: short windows, then long ones."""
    short = windows(encoded, CONTEXT, schedule.batch_tokens, seed)
    long = windows(encoded, LONG_CONTEXT, schedule.batch_tokens, seed + 1)
    for step in range(schedule.num_steps):
        yield next(long if step >= schedule.num_short_steps else short)


def windows(encoded: list[Tokens], context: int, batch_tokens: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches ``[batch_tokens // context, context + 1]`` without end. Each pass shuffles and joins the documents."""
    rng = np.random.default_rng(seed)
    batch_size = batch_tokens // context
    while True:
        stream = np.concatenate([encoded[index] for index in rng.permutation(len(encoded))])
        starts = np.arange(int(rng.integers(context)), len(stream) - context - 1, context)
        rng.shuffle(starts)
        for batch in starts[: len(starts) // batch_size * batch_size].reshape(-1, batch_size):
            yield np.stack([stream[start : start + context + 1] for start in batch]).astype(np.int64)


def accumulate_gradients(model: LlamaForCausalLM, batch: torch.Tensor) -> float:
    """Add the gradients of the mean cross-entropy of a batch ``[batch, context + 1]``; return the mean in nats.

    Logits are computed for `LOSS_CHUNK` positions at a time, since those of a whole batch exceed the cache.
    """
    hidden = hidden_states(model, batch[:, :-1])
    targets = batch[:, 1:].flatten()
    leaf = hidden.detach().requires_grad_()  # [num_tokens, hidden_size]
    total = 0.0
    for chunk, target in zip(torch.split(leaf, LOSS_CHUNK), torch.split(targets, LOSS_CHUNK), strict=True):
        loss = F.cross_entropy(logits_of(model, chunk), target, reduction="sum") / len(targets)
        loss.backward()
        total += loss.item()
    hidden.backward(leaf.grad)
    return total


@torch.inference_mode()
def predictions(model: LlamaForCausalLM, tokens: Tokens) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits ``[num_tokens, vocab]`` and targets ``[num_tokens]`` of each window of `CONTEXT` tokens of a document."""
    model.train(False)
    for start in range(0, len(tokens) - 1, CONTEXT):
        window = torch.from_numpy(tokens[start : start + CONTEXT + 1].astype(np.int64))
        yield logits_of(model, hidden_states(model, window[None, :-1])), window[1:]


def hidden_states(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states ``[num_tokens, hidden_size]`` of ids ``[batch, context]``, with bfloat16 matrices."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden: torch.Tensor = model.model(ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)


def logits_of(model: LlamaForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """Return float32 logits ``[num_tokens, vocab]`` of hidden states ``[num_tokens, hidden_size]``."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: torch.Tensor = model.lm_head(hidden)
    return logits.float()


def build_optimizers(model: LlamaForCausalLM, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for the tied embedding and the norms.

    Muon (Jordan et al., 2024, scaled as in Liu et al., 2025) needs half as many steps as AdamW here. Each group's ``peak`` is
    its highest learning rate.
    """
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_inner_matrix = parameter.dim() == 2 and "embed_tokens" not in name
        (matrices if is_inner_matrix else rest).append(parameter)
    return [
        torch.optim.Muon(
            [{"params": matrices, "peak": schedule.peak_matrices}],
            lr=schedule.peak_matrices,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [{"params": rest, "peak": schedule.peak_embedding}],
            lr=schedule.peak_embedding,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        ),
    ]


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load weights and optimizers; return the next step."""
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return int(state["step"])


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], step: int
) -> None:
    """Replace the checkpoint atomically."""
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
