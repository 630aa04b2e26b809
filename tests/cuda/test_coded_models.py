"""Quantized checkpoints on a device, with coded weights: the tokens of the dequantized model, and the same bits in any
batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from bench.gpu.engine import InProcessEngine
from bench.quantization import layers
from bench.quantization.layers import Written
from tests.cuda.test_worker import worker_on
from tests.cuda.test_worker_bits import ask, bits_of
from tests.gpu.small import with_blocks, with_executor, with_scheduler
from tests.models.checkpoints.quantized import SETTINGS, write
from tests.models.equality import Loaded, load
from tests.models.kv.kv_scales import with_scales
from tests.models.random_checkpoints import of_transformers, write_checkpoint
from tests.models.rows import moe

from quintet.executor.backends.cuda import experts
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.coded_weight import Code
from quintet.executor.backends.cuda.ops.linear_coded import coded_grouped_matmul
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.executor.checkpoints.quant.coded import CodedLinear

EXPERTS = transformers.Qwen3MoeConfig(
    **SETTINGS | {"num_hidden_layers": 1},  # type: ignore[arg-type]
    moe_intermediate_size=64,
    num_experts=6,
    num_experts_per_tok=2,
    tie_word_embeddings=True,
)
GROUPS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
MODELS: dict[str, tuple[Written, transformers.PretrainedConfig | None]] = {
    "awq, experts": (layers.awq(32), EXPERTS),
}
MORE_MODELS: dict[str, tuple[Written, transformers.PretrainedConfig | None]] = {
    "gptq": (layers.gptq(4, 64, symmetric=True), None),
    "gptq, ordered": (layers.gptq(4, 32, symmetric=False, by_activations=True), None),
    "gptq, 8 bits, experts": (layers.gptq(8, 32, symmetric=True), EXPERTS),
    "fp8": (layers.fp8(block=True), None),
    "mxfp4, experts": (
        layers.compressed(GROUPS, "mxfp4-pack-quantized", tensors=layers.four_bit_floats(32)),
        EXPERTS,
    ),
    "nf4, which is rounded": (layers.bitsandbytes("nf4"), None),
    "biases, a tied embedding": (
        layers.gptq(4, 64, symmetric=True),
        transformers.Qwen2Config(**SETTINGS, tie_word_embeddings=True),  # type: ignore[arg-type]
    ),
}
NUMBERS = (4, 5)
"""Prompts of 16 and 17 tokens."""


def first_token_logprobs(engine: InProcessEngine, number: int) -> dict[int, float]:
    """Return the most first_token_logprobs first tokens with their log-probabilities."""
    first = engine.logprobs[number][0]
    tokens, logprobs = np.frombuffer(first.token_ids, np.int32), np.frombuffer(first.logprobs, np.float32)
    return dict(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def agree(ours: Path, reference: Loaded, device: Device) -> DeviceWorker:
    """Compare the tokens of a quantized checkpoint with those of its dequantized numbers in fp32; return the worker."""
    expected = ask(reference.config, reference.worker, NUMBERS)
    config = with_scheduler(with_blocks(load(ours, "float16").config, 100), max_num_seqs=8)
    config = with_executor(config, batch_invariant=True)
    worker = worker_on(device, config)
    together = ask(config, worker, NUMBERS)
    for number in NUMBERS:
        actual, exact = first_token_logprobs(together, number), first_token_logprobs(expected, number)
        common = actual.keys() & exact.keys()
        assert len(common) >= len(exact) - 1, (actual, exact)
        # A dozen results in a row are rounded to fp16, by 2^-12 of each, and logits are below 8.
        assert all(abs(actual[token] - exact[token]) < 0.02 for token in common), (actual, exact)
    assert bits_of(ask(config, worker, NUMBERS[:1]))[NUMBERS[0]] == bits_of(together)[NUMBERS[0]], "alone"
    in_chunks = with_scheduler(config, max_num_batched_tokens=29, long_prefill_token_threshold=13)
    assert bits_of(ask(in_chunks, worker, NUMBERS)) == bits_of(together), "in chunks"
    return worker


@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(each, marks=pytest.mark.whole) for each in MORE_MODELS)]
)
def test_coded_weights_give_the_tokens_of_the_dequantized_model(
    name: str, tmp_path: Path, device: Device
) -> None:
    written, of = (MODELS | MORE_MODELS)[name]
    ours, plain = write(tmp_path, written, of)
    worker = agree(ours, load(plain), device)
    assert any(isinstance(layer.method, CodedLinear) for layer in worker.runner.last_pass.linears) != (
        "rounded" in name
    )


@pytest.mark.whole
def test_experts_stored_as_codes_by_the_model(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss: MXFP4 in its own layout, with interleaved rows of gates and ups, and biases."""
    multiplied = []

    def counting(*operands: Any) -> torch.Tensor:
        multiplied.append(operands[4].layout.code)
        return coded_grouped_matmul(*operands)

    monkeypatch.setattr(experts, "coded_grouped_matmul", counting)
    write_checkpoint(moe.ROWS["gpt-oss, 4 bits"], tmp_path)
    agree(tmp_path, load(tmp_path), device)
    assert set(multiplied) == {Code.FP4}


@pytest.mark.whole
def test_fp8_keys_and_values_equal_those_of_the_host(tmp_path: Path, device: Device) -> None:
    """By the checkpoint's scales, in fp32, where only sums in another order may put a number on the other side of a tie."""
    write_checkpoint(with_scales(of_transformers("LlamaConfig", num_hidden_layers=2)), tmp_path)
    reference = load(tmp_path)
    expected = ask(reference.config, reference.worker, NUMBERS)
    config = with_scheduler(with_blocks(reference.config, 100), max_num_seqs=8)
    together = ask(config, worker_on(device, config), NUMBERS)
    for number in NUMBERS:
        actual, exact = first_token_logprobs(together, number), first_token_logprobs(expected, number)
        common = actual.keys() & exact.keys()
        assert len(common) >= len(exact) - 1, (actual, exact)
        assert all(abs(actual[token] - exact[token]) < 1e-3 for token in common), (actual, exact)
