"""A family's tiny random checkpoint, and what greedy decoding of it is to give, by somebody else's arithmetic.

A family is one `Row`: who writes a checkpoint into a folder and returns its reference, a function from tokens to logits.
`of_transformers` makes one of a configuration class and its settings; a family that transformers has no class for brings a
plain torch module of ``tests/models/references`` (`of_module`).

Greedy decoding compares logits, so a near tie may fall either way by rounding alone. No comparison here tolerates that:
`expectations` draws prompts until each has a reference continuation whose every choice leads by `DECISIVE`, which is a
property of the reference alone, and then the tokens must be equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from safetensors.torch import save_file

Logits = Callable[[list[int]], torch.Tensor]
"""From the tokens of one sequence to fp32 ``[tokens, vocabulary]``."""

SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""Settings of every row that does not say otherwise, as far as its configuration class has them."""

LENGTHS = (1, 8, 15, 16, 17, 31, 50)
"""Of prompts: the least, around the border of a block of 16 tokens, over several; windows of the rows are 9 to 20."""

NUM_TOKENS = 12
"""Drawn after each prompt."""

DECISIVE = 1e-3
"""By how much the reference's best token leads at each choice, in deviations of that choice's logits. What fp32 sums of
another order differ by is below `CLOSE`; with some 200 tokens one choice in 150 or so is closer than this."""

CLOSE = 2e-4
"""How far our fp32 logits may be from the reference's, in the same unit: sums of some hundred fp32 products in another order
through a few layers differ by 1e-5 or less, an epsilon or a scale that is wrong by a part in a thousand by more than this."""


@dataclass(frozen=True, slots=True)
class Row:
    """A family of the table."""

    make: Callable[[Path], Logits]
    """Writes ``config.json`` and ``model.safetensors`` (or what the family's checkpoints are) into a folder."""
    card: Mapping[str, Any] = field(default_factory=dict)
    """What the card says besides, or instead: checkpoints of the wild spell it so."""
    close: float = CLOSE
    """In place of `CLOSE`, where the row says why."""
    quantized: tuple[float, float] = (0.99, 0.7)
    """How alike, at least, the first logits of int8 and of int4 weights are to the reference's: less, where rounding may choose
    other experts, which are as unlike as any two of a random checkpoint."""
    recorded: bool = True
    """Whether the compiled kernels take it; False only for a shape that they refuse with a line in the log."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """One prompt, with what follows it."""

    prompt: list[int]
    outputs: list[int]
    logits: torch.Tensor
    """fp32 ``[NUM_TOKENS, vocabulary]``: what each output was chosen from."""


class ReferenceModule(Protocol):
    """A plain torch module: ``module(token_ids [tokens]) -> logits [tokens, vocabulary]``."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits of one sequence."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors under the names that the family's checkpoints have."""

    def parameters(self) -> Any:
        """Return the tensors that are to be drawn."""


def of_transformers(
    config: str,
    seed: int = 1,
    card: Mapping[str, Any] | None = None,
    attention: str = "eager",
    **settings: Any,
) -> Row:
    """Return the row of a configuration class of transformers (``"BloomConfig"``) with `SMALL` and ``settings``.

    ``attention``: which of transformers' computes, where its eager one is wrong.
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

        def logits(tokens: list[int]) -> torch.Tensor:
            result: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
            return result

        return logits

    return Row(make, card or {})


def of_module(
    card: Mapping[str, Any], module: Callable[[Mapping[str, Any]], ReferenceModule], seed: int = 1
) -> Row:
    """Return the row of a plain torch module that is made of the card it is saved with."""

    def make(folder: Path) -> Logits:
        torch.manual_seed(seed)
        model = module(card)
        randomise(model)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(card))
        tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")

        def logits(tokens: list[int]) -> torch.Tensor:
            return model(torch.tensor(tokens))

        return logits

    return Row(make)


@torch.no_grad()
def randomise(model: Any) -> None:
    """Draw weights that spread the logits over some deviations: biases, norms and saved buffers too.

    An embedding that is the output layer as well is smaller, or every token is followed by itself.
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
    """Write the row's checkpoint, with the card's changes and an empty tokenizer; return its reference."""
    logits = row.make(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | dict(row.card)))
    (folder / "tokenizer.json").write_text("{}")
    return logits


@torch.inference_mode()
def expectations(logits: Logits, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Expectation]:
    """Return a decisive continuation for a prompt of each length; see the head of the file."""
    draw, vocab_size = random.Random(seed), logits([1]).shape[-1]
    found = []
    for length in lengths:
        for _ in range(50):
            prompt = [draw.randrange(vocab_size) for _ in range(length)]
            expectation = _continued(logits, prompt)
            if expectation is not None:
                found.append(expectation)
                break
        else:
            raise AssertionError(
                f"of 50 prompts of {length} tokens none is decided by {DECISIVE} at every step"
            )
    kinds = {token for each in found for token in each.outputs}
    assert len(kinds) > 3, f"the reference says only {kinds}, whatever it is asked: draw other weights"
    return found


def _continued(logits: Logits, prompt: list[int]) -> Expectation | None:
    """Decode greedily; None where a choice is close."""
    tokens, rows = list(prompt), []
    for _ in range(NUM_TOKENS):
        last = logits(tokens)[-1].float()
        best, second = last.topk(2).values.tolist()
        if best - second < DECISIVE * float(last.std()):
            return None
        rows.append(last)
        tokens.append(int(last.argmax()))
    return Expectation(prompt, tokens[len(prompt) :], torch.stack(rows))
