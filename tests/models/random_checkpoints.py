"""Tiny random checkpoints of a family, and expected greedy tokens by an independent implementation.

A family is one `Row`: a function that writes a checkpoint into a folder and returns its reference, a function from tokens
to logits. `of_transformers` builds one from a configuration class and its settings. A family without a class in
transformers supplies a plain torch module of ``tests/models/references`` (`of_module`).

Greedy decoding compares logits, so rounding alone may decide a near tie. No comparison here tolerates that. `expectations`
draws prompts until each has a reference continuation with a lead of `DECISIVE` at every choice. That depends on the
reference only; then the tokens must be equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors.torch import save_file

Logits = Callable[[Sequence[list[int]]], list[torch.Tensor]]
"""From the tokens of some sequences to fp32 ``[tokens, vocabulary]`` of each."""

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""Default settings of the rows, as far as their configuration class has them."""

LENGTHS = (1, 8, 15, 16, 17, 31, 50)
"""Prompt lengths: the minimum, around the border of a block of 16 tokens, over several; windows of the rows are 9 to 20."""

NUM_TOKENS = 12
"""Drawn after each prompt."""

DECISIVE = 1e-3
"""The least lead of the reference's best token at each choice, in deviations of that choice's logits.

fp32 sums in another order differ by less than `CLOSE`; with some 200 tokens about one choice in 150 is closer than this.
"""

CLOSE = 2e-4
"""The largest difference of our fp32 logits from the reference's, in the same unit.

Sums of some hundred fp32 products in another order through a few layers differ by 1e-5 or less. An epsilon or a scale wrong
by a thousandth differs by more than this.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A family of the table."""

    make: Callable[[Path], Logits]
    """Writes ``config.json`` and ``model.safetensors`` (or the family's other files) into a folder."""
    hf_config: Mapping[str, Any] = field(default_factory=dict)
    """Additional or replaced keys of the config, as in published checkpoints."""
    close: float = CLOSE
    """Replaces `CLOSE`, where the row gives the reason."""
    quantized: tuple[float, float] = (0.99, 0.7)
    """Least similarity of the first logits of int8 and int4 weights with the reference's.

    Lower where rounding may choose other experts, which differ as much as any two of a random checkpoint.
    """
    recorded: bool = True
    """The compiled kernels support it; False only for a shape that they reject with a log line."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """One prompt with its continuation."""

    prompt: list[int]
    outputs: list[int]
    logits: torch.Tensor
    """fp32 ``[NUM_TOKENS, vocabulary]``: the logits of each output token."""


class ReferenceModule(Protocol):
    """A plain torch module: ``module(token_ids [tokens]) -> logits [tokens, vocabulary]``."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits of one sequence."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors under the names of the family's checkpoints."""

    def parameters(self) -> Any:
        """Return the tensors to randomise."""


def of_transformers(
    config: str,
    seed: int = 1,
    hf_config: Mapping[str, Any] | None = None,
    attention: str = "eager",
    **settings: Any,
) -> Row:
    """Return the row of a configuration class of transformers (``"BloomConfig"``) with `SMALL` and ``settings``.

    ``attention``: transformers' implementation to use, where its eager one is wrong.
    """

    def make(folder: Path) -> Logits:
        kind = getattr(transformers, config)
        defaults = kind()
        chosen = {key: value for key, value in SMALL.items() if hasattr(defaults, key)} | settings
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            kind(**chosen), attn_implementation=attention, dtype=torch.float32
        ).eval()
        randomise(model)
        model.save_pretrained(folder)
        return batched_logits(model)

    return Row(make, hf_config or {})


def batched_logits(model: Any) -> Logits:
    """Return the logits of a model of transformers, which computes sequences as a batch.

    Shorter sequences are padded at the end, where no token sees the padding. A RoPE scaled by the longest sequence of a
    batch would break that; none is scaled below the lengths of the tests.
    """

    def logits(sequences: Sequence[list[int]]) -> list[torch.Tensor]:
        most = max(map(len, sequences))
        filled = torch.tensor([[*tokens, *[0] * (most - len(tokens))] for tokens in sequences])
        rows = model(filled, use_cache=False).logits
        return [row[: len(tokens)] for row, tokens in zip(rows, sequences, strict=True)]

    return logits


def of_module(
    hf_config: Mapping[str, Any], module: Callable[[Mapping[str, Any]], ReferenceModule], seed: int = 1
) -> Row:
    """Return the row of a plain torch module, built from the config that is saved with it."""

    def make(folder: Path) -> Logits:
        torch.manual_seed(seed)
        model = module(hf_config)
        randomise(model)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(hf_config))
        tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")

        return lambda sequences: [model(torch.tensor(tokens)) for tokens in sequences]

    return Row(make)


@torch.no_grad()
def randomise(model: Any) -> None:
    """Draw weights that spread the logits over some deviations: biases, norms and saved buffers too.

    A tied embedding is smaller, or every token would be followed by itself.
    """
    for parameter in model.parameters():
        if parameter.dim() <= 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        else:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    if isinstance(model, transformers.PreTrainedModel) and model.config.tie_word_embeddings:
        model.get_input_embeddings().weight.mul_(0.25)
    saved = model.state_dict()
    for name, buffer in getattr(model, "named_buffers", list)():
        if name in saved and buffer.is_floating_point():
            buffer.add_(torch.randn_like(buffer) * 0.1)


def write_checkpoint(row: Row, folder: Path) -> Logits:
    """Write the row's checkpoint, with the config's changes and an empty tokenizer; return its reference."""
    logits = row.make(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | dict(row.hf_config)))
    (folder / "tokenizer.json").write_text("{}")
    return logits


@torch.inference_mode()
def expectations(logits: Logits, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Expectation]:
    """Return a decisive continuation for a prompt of each length; see the module docstring."""
    draw, vocab_size = random.Random(seed), logits([[1]])[0].shape[-1]
    found: dict[int, Expectation] = {}
    for _ in range(50):
        left = [length for length in lengths if length not in found]
        if not left:
            break
        drawn = _continued(logits, [[draw.randrange(vocab_size) for _ in range(length)] for length in left])
        found |= {length: each for length, each in zip(left, drawn, strict=True) if each is not None}
    assert found.keys() >= set(lengths), (
        f"of 50 prompts none is decided by {DECISIVE} at every step: {found.keys()} of {lengths}"
    )
    kinds = {token for each in found.values() for token in each.outputs}
    assert len(kinds) > 3, f"the reference generates only {kinds} for every prompt: draw other weights"
    return [found[length] for length in lengths]


def _continued(logits: Logits, prompts: list[list[int]]) -> list[Expectation | None]:
    """Decode greedily; None where a choice is close."""
    tokens = [list(prompt) for prompt in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for _ in range(NUM_TOKENS):
        for i, each in enumerate(logits(tokens)):
            last = each[-1].float()
            rows[i].append(last)
            tokens[i].append(int(last.argmax()))
    return [
        Expectation(prompt, tokens[i][len(prompt) :], torch.stack(rows[i])) if _is_decided(rows[i]) else None
        for i, prompt in enumerate(prompts)
    ]


def _is_decided(rows: Sequence[torch.Tensor]) -> bool:
    """Return whether each choice leads by `DECISIVE`."""
    logits = torch.stack([*rows])
    best, second = logits.topk(2).values.unbind(-1)
    return bool((best - second >= DECISIVE * logits.std(-1)).all())


@torch.inference_mode()
def greedy(logits: Logits, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy continuation of each prompt."""
    tokens = [list(prompt) for prompt in prompts]
    for _ in range(num_tokens):
        for sequence, rows in zip(tokens, logits(tokens), strict=True):
            sequence.append(int(rows[-1].argmax()))
    return [sequence[len(prompt) :] for sequence, prompt in zip(tokens, prompts, strict=True)]
