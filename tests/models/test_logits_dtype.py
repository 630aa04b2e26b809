"""Logits are float32 sums of the output layer: of 16-bit hidden states and weights, without rounding to 16 bits.

A second checkpoint with an identity matrix as output layer exposes the hidden states as its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.distributed.ranks import in_ranks
from tests.models.distributed.test_stages import LogprobRecorder
from tests.models.equality import GREEDY, Dtype, Loaded, Outcome, alone, load
from tests.models.random_checkpoints import of_transformers, write_checkpoint
from tests.models.test_engine import changed

HIDDEN, VOCAB = 64, 96
PROMPTS = [[(5 * i + n) % VOCAB for i in range(n)] for n in (1, 2, 7, 17, 33)]
ONE_TOKEN = msgspec.structs.replace(GREEDY, max_tokens=1)
SUMS = 2e-6
"""Largest difference between sums of `HIDDEN` products in float32 and in float64, as a share of the products' magnitudes."""
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"tie_word_embeddings": False},
    "PhiConfig": {},  # with a bias in the output layer
}

Load = Callable[[Path, Dtype], Any]


def write(folder: Path, family: str = "LlamaConfig", **settings: Any) -> None:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
    write_checkpoint(of_transformers(family, **sizes, **FAMILIES.get(family, {}) | settings), folder)


def with_head(folder: Path, head: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Replace a checkpoint's output layer; without a bias by default."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = head.contiguous()
    if "lm_head.bias" in tensors:
        tensors["lm_head.bias"] = torch.zeros(len(head)) if bias is None else bias
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def head_of(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias of the output layer as multiplied, in float64."""
    tensors = load_file(folder / "model.safetensors")
    bias = tensors.get("lm_head.bias", torch.zeros(VOCAB))
    return tensors["lm_head.weight"].to(dtype).double(), bias.to(dtype).double()


@contextmanager
def by_program(folder: Path, dtype: Dtype) -> Iterator[Loaded]:
    yield load(folder, dtype)


@contextmanager
def by_torch(folder: Path, dtype: Dtype) -> Iterator[Loaded]:
    yield load(folder, dtype, compiled=False)


@contextmanager
def by_transformers(folder: Path, dtype: Dtype) -> Iterator[Loaded]:
    yield load(folder, dtype, model_impl="transformers")


@contextmanager
def by_transformers_and_torch(folder: Path, dtype: Dtype) -> Iterator[Loaded]:
    yield load(folder, dtype, compiled=False, model_impl="transformers")


@contextmanager
def by_ranks(folder: Path, dtype: Dtype) -> Iterator[Loaded]:
    with in_ranks(folder, 2, dtype) as loaded:
        yield loaded


def first_logits(outcome: Outcome) -> torch.Tensor:
    """Return float32 ``[prompts, VOCAB]``: the logits of the first token after each prompt."""
    rows = [outcome.bits[i, len(prompt)] for i, prompt in enumerate(PROMPTS)]
    assert {len(row) for row in rows} == {4 * VOCAB}, "not float32"
    return torch.stack([torch.from_numpy(np.frombuffer(row, np.float32).copy()) for row in rows])


def logits_of(opened: Any) -> tuple[torch.Tensor, list[int]]:
    """Return the first logits after each prompt, and the tokens drawn from them."""
    with opened as loaded:
        outcome = alone(loaded, PROMPTS, ONE_TOKEN)
    return first_logits(outcome), [tokens[0] for tokens in outcome.outputs]


def hidden_states(opener: Load, folder: Path, dtype: Dtype) -> torch.Tensor:
    """Return float64 ``[prompts, HIDDEN]``: the inputs of the output layer."""
    tensors = (folder / "model.safetensors").read_bytes()
    with_head(folder, torch.eye(VOCAB, HIDDEN))
    try:
        return logits_of(opener(folder, dtype))[0][:, :HIDDEN].double()
    finally:
        (folder / "model.safetensors").write_bytes(tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "opener", [by_program, by_torch, by_transformers, by_transformers_and_torch, by_ranks]
)
def test_logits_are_sums_in_float32(opener: Load, family: str, dtype: Dtype, tmp_path: Path) -> None:
    write(tmp_path, family)
    hidden = hidden_states(opener, tmp_path, dtype)
    found, tokens = logits_of(opener(tmp_path, dtype))
    head, bias = head_of(tmp_path, TORCH_DTYPES[dtype])
    expected = hidden @ head.T + bias
    magnitudes = hidden.abs() @ head.abs().T + bias.abs()
    assert ((found - expected).abs() <= SUMS * magnitudes).all()
    assert tokens == expected.argmax(1).tolist()


@pytest.mark.parametrize("opener", [by_program, by_torch])
def test_tie_in_bf16_is_decided_in_float32(opener: Load, tmp_path: Path) -> None:
    write(tmp_path)
    common = 4 * hidden_states(opener, tmp_path, "bfloat16")[0]
    apart = 0.05 * torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    with_head(tmp_path, common.float() + apart)
    expected = hidden_states(opener, tmp_path, "bfloat16") @ head_of(tmp_path, torch.bfloat16)[0].T
    best = (
        expected[0].to(torch.bfloat16).eq(expected[0].to(torch.bfloat16).max()).nonzero().flatten().tolist()
    )
    assert len(best) > 1 and best[0] != int(expected[0].argmax()), "rounded, it is no tie: draw another layer"
    assert logits_of(opener(tmp_path, "bfloat16"))[1][0] == int(expected[0].argmax())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("impl", ["quintet", "transformers"])
def test_logits_in_the_model_dtype_are_selectable(impl: str, compiled: bool, tmp_path: Path) -> None:
    """They are the rounded sums; greedy takes the lower of two ids with equal rounded logits."""
    write(tmp_path)

    def outcome(**options: Any) -> Outcome:
        return alone(
            load(tmp_path, "bfloat16", compiled=compiled, model_impl=impl, **options), PROMPTS, ONE_TOKEN
        )

    sums, rounded = first_logits(outcome()), outcome(logits_dtype="model")
    for i, prompt in enumerate(PROMPTS):
        row = torch.frombuffer(bytearray(rounded.bits[i, len(prompt)]), dtype=torch.bfloat16)
        if impl == "quintet" and compiled:
            assert torch.equal(row, sums[i].to(torch.bfloat16))
        else:  # torch's sums in the two formats have two orders
            assert torch.allclose(row.float(), sums[i], rtol=2**-8, atol=1e-4)
        assert rounded.outputs[i] == [int(row.float().argmax())]


@pytest.mark.parametrize(
    ("family", "off", "on", "expected"),
    [
        (
            "Gemma2Config",
            {"final_logit_softcapping": None},
            {"final_logit_softcapping": 0.75},
            lambda logits: 0.75 * torch.tanh(logits / 0.75),
        ),
        ("GraniteConfig", {"logits_scaling": 1.0}, {"logits_scaling": 3.0}, lambda logits: logits / 3.0),
    ],
    ids=["soft cap", "scale"],
)
@pytest.mark.parametrize("opener", [by_program, by_torch, by_transformers, by_ranks])
def test_operations_after_the_output_layer_are_in_float32(
    opener: Load,
    family: str,
    off: dict[str, Any],
    on: dict[str, Any],
    expected: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
) -> None:
    plain, changed_ = tmp_path / "plain", tmp_path / "changed"
    write(plain, family, **off)
    write(changed_, family, **on)
    logits = logits_of(opener(plain, "bfloat16"))[0]
    found = logits_of(opener(changed_, "bfloat16"))[0]
    assert torch.allclose(found, expected(logits), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("opener", [by_program, by_torch])
def test_log_probabilities_use_float32_sums(opener: Load, tmp_path: Path) -> None:
    write(tmp_path)
    logits, tokens = logits_of(opener(tmp_path, "bfloat16"))
    expected = logits.double().log_softmax(1)
    params = msgspec.structs.replace(ONE_TOKEN, logprobs=3, prompt_logprobs=1)
    with opener(tmp_path, "bfloat16") as loaded:
        for i, prompt in enumerate(PROMPTS):
            driver = LogprobRecorder(changed(loaded.config), loaded.worker)
            driver.admit(0, prompt, params)
            driver.run()
            [(_, ids, values)] = driver.drawn
            best = expected[i].topk(3)
            assert np.frombuffer(ids, np.int32).tolist() == [tokens[i], *best.indices.tolist()]
            apart = np.abs(np.frombuffer(values, np.float32)[1:] - best.values.numpy())
            assert apart.max() < 1e-5, prompt
            if i:  # the previous position ends before this prompt's last token
                assert len(driver.of_prompts) == len(prompt) - 1
