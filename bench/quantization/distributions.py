"""Compare next-token distributions of two loads of one model over a text: perplexity, KL divergence, top token.

The executor's worker runs in this process: the kernels, the paged KV memory and the number formats of a server, without its
processes. A server returns log-probabilities of some tokens only, and a divergence needs those of the whole vocabulary.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.executor.backends.registry import make_worker
from quintet.executor.sequences import place, plan_of_parts
from quintet.executor.slots import Rows
from quintet.executor.worker import Worker

Reference = list[torch.Tensor]
"""Log-probabilities of each window, float32 ``[tokens - 1, vocabulary]``."""


@dataclass(frozen=True, slots=True)
class Score:
    """Results of one load of a model over a text, compared with the reference."""

    name: str
    memory_mb: float
    """Bytes of the weights in memory."""
    kv_bytes: int
    """KV bytes per token."""
    perplexity: float
    divergence: float
    """Mean KL divergence from the reference, in nats."""
    same_choice: float
    """Share of positions with the same most likely token as the reference."""
    num_tokens: int
    file_mb: float | None = None
    """Bytes of the weights on disk; None for those of the reference."""


@dataclass(slots=True)
class _Sums:
    nats: float = 0.0
    divergence: float = 0.0
    same: int = 0
    num_tokens: int = 0


def score(name: str, options: Mapping[str, Any], windows: Sequence[list[int]], reference: Reference) -> Score:
    """Load a model with ``options`` and score it. An empty reference is filled with the log-probabilities of this load.

    Raises `ConfigError` if the options do not fit the model.
    """
    is_reference = not reference
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(_options(options, windows), Path(folder) / "run", http=False).config
    worker, kv = make_worker(config), config.model.kv
    assert isinstance(worker, Worker)
    sums = _Sums()
    for index, (tokens, logprobs) in enumerate(zip(windows, _logprobs(worker, windows), strict=True)):
        if is_reference:
            reference.append(logprobs)
        theirs = reference[index]
        own = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])
        sums.nats -= own.sum().item()
        sums.divergence += (theirs.exp() * (theirs - logprobs)).sum().item()
        sums.same += int((theirs.argmax(-1) == logprobs.argmax(-1)).sum())
        sums.num_tokens += len(own)
    memory_mb = float(worker.facts["weights"].split()[0])
    del worker
    gc.collect()
    count = sums.num_tokens
    return Score(
        name,
        memory_mb,
        kv.bytes_per_block // kv.block_size,
        math.exp(sums.nats / count),
        sums.divergence / count,
        sums.same / count,
        count,
    )


def _options(options: Mapping[str, Any], windows: Sequence[list[int]]) -> Options:
    longest = max(map(len, windows))
    return Options(
        device="cpu",
        max_model_len=longest + 1,
        max_num_seqs=1,
        max_num_batched_tokens=longest,
        kv_cache_memory="256MiB",
        **options,
    )


@torch.inference_mode()
def _logprobs(worker: Worker, windows: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities of each window, after all tokens but the last."""
    runner, width = worker.runner, worker.num_blocks // len(worker.tables.block_table)
    width = min(width, worker.tables.block_table.shape[-1])
    for tokens in windows:
        place(worker.tables, 0, torch.tensor(tokens, dtype=torch.int32), width)
        runner.forward(Rows(plan_of_parts([(0, 0, len(tokens))], draws=False)), worker.tables)
        asked = np.arange(len(tokens) - 1)
        pieces = [
            runner.logits(asked[begin : begin + runner.max_outputs]).float().log_softmax(-1)
            for begin in range(0, len(asked), runner.max_outputs)
        ]
        yield torch.cat(pieces)


def table(scores: Sequence[Score]) -> str:
    """Return the scores as a Markdown table."""
    lines = [
        "| weights, KV | file, MB | in memory, MB | KV, bytes a token | perplexity | KL divergence | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in scores:
        file = "" if each.file_mb is None else f"{each.file_mb:.1f}"
        lines.append(
            f"| {each.name} | {file} | {each.memory_mb:.1f} | {each.kv_bytes:,} | {each.perplexity:.3f} |"
            f" {each.divergence:.5f} | {each.same_choice:.2%} |"
        )
    return "\n".join(lines)
