"""Training of draft heads: Quintet serves what the trainer writes, and proposes the same drafts."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.embedded import chats
from bench.embedded.chats import Chat, Texts, batches, observe
from bench.embedded.heads import KINDS, drafts_of, loss_of, train
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from quintet.deploy.embedded import default_model_path
from quintet.wire.params import SamplingParams
from tests.models.equality import Loaded, load
from tests.models.speculation.draft_heads import record_drafts
from tests.models.speculation.longest_drafts import drafting
from tests.models.test_engine import CoreAndWorker

MODEL, LENGTH, NUM_FREQUENT = default_model_path(), 160, 2048
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(MODEL).float()
    return loaded.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def known() -> list[Chat]:
    """Return chats about this file."""
    tokens = Tokenizer.from_file(str(Path(MODEL) / "tokenizer.json")).encode(Path(__file__).read_text()).ids
    starts = range(0, len(tokens) - LENGTH, LENGTH)
    texts = [np.array(tokens[start : start + LENGTH], np.int32) for start in starts]
    return [Chat(text, 20, is_held_out=False, is_greedy=True) for text in texts]


def fitted(kind: str, model: Any, known: list[Chat]) -> tuple[Any, Texts]:
    """Return a head with its first weights, and the texts that it is fitted to."""
    torch.manual_seed(1)
    tokens = np.concatenate([chat.token_ids for chat in known])
    frequent = np.argsort(-np.bincount(tokens, minlength=model.config.vocab_size))[:NUM_FREQUENT]
    head = KINDS[kind](model, torch.from_numpy(np.sort(frequent)))
    texts = observe(model, known, head.aux_layers)
    head.fit(model, texts)
    return head, texts


def served(kind: str, folder: Path) -> Loaded:
    """Load a head that the trainer has written."""
    flag: dict[str, Any] = {"method": kind, "num_speculative_tokens": 3}
    if kind == "mtp":
        return load(folder, speculative_config=json.dumps(flag))
    return load(Path(MODEL), speculative_config=json.dumps(flag | {"model": str(folder)}))


def run(loaded: Loaded, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy outputs of each prompt."""
    driver = CoreAndWorker(loaded.config, loaded.worker)
    for index, prompt in enumerate(prompts):
        driver.admit(index + 1, prompt, GREEDY)
    driver.run()
    return [driver.outputs[index + 1] for index in range(len(prompts))]


def states_of(head: Any, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the hidden states that the head reads, in float32."""
    with torch.no_grad():
        found = model.model(ids[None], output_hidden_states=True)
    parts = [found.hidden_states[at] for at in head.aux_layers] or [found.last_hidden_state]
    return torch.cat(parts, -1)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_served_drafts_are_those_of_the_trainer(
    kind: str, model: Any, known: list[Chat], tmp_path: Path
) -> None:
    head, _ = fitted(kind, model, known)
    for name, part in head.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            nn.init.normal_(part.weight, std=part.weight.shape[1] ** -0.5)
    head.export(tmp_path, model)
    loaded = served(kind, tmp_path)
    found = record_drafts(drafting(loaded.worker))
    run(loaded, [chat.token_ids[:48].tolist() for chat in known[:3]] + [known[3].token_ids[:1].tolist()])
    equal: list[bool] = []
    for tokens, drafts in found:
        ids = torch.tensor(tokens + drafts)
        expected = drafts_of(head, model, ids, states_of(head, model, ids))
        equal += [
            int(expected[depth][len(tokens) - 1 + depth]) == draft for depth, draft in enumerate(drafts)
        ]
    assert len(equal) > 60
    assert np.mean(equal) > 0.97  # bfloat16 weights are served


def test_checkpoint_with_a_prediction_layer_gives_the_tokens_of_its_model(
    model: Any, known: list[Chat], tmp_path: Path
) -> None:
    fitted("mtp", model, known)[0].export(tmp_path, model)
    prompts = [chat.token_ids[:length].tolist() for chat, length in zip(known, (1, 30, 60), strict=False)]
    expected = run(load(Path(MODEL)), prompts)
    assert run(load(tmp_path), prompts) == run(served("mtp", tmp_path), prompts) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(
    kind: str, model: Any, known: list[Chat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "BATCH_TOKENS", 2 * chats.CONTEXT)
    head, texts = fitted(kind, model, known)
    batch = next(batches(texts, 0))
    before = loss_of(head, model, batch).item()
    train(head, model, texts, Namespace(peak=0.005, steps=6, seed=0), tmp_path / "checkpoint.pt")
    assert loss_of(head, model, batch).item() < before
