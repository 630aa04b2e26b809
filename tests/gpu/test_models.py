"""Rows ``models-fp32`` and ``models-bf16`` of docs/gpu.md: tokens of the engine against transformers.

fp32: greedy tokens are equal. bf16: two implementations round differently, so tokens match at most positions. The measure
is the share of positions with the same token after the same text. It is taken once for prompts (transformers'
continuations, given to the engine whole). It is taken once for decoding (the engine's continuation up to its first
different token).
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from bench.gpu.engine import InProcessEngine
from bench.gpu.figures import Figure, Report
from tests.gpu.small import BLOCK_SIZE, ready_worker, with_blocks, with_scheduler
from tests.models.conftest import engine_config, serve
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.test_engine import GREEDY, NUM_TOKENS, CoreAndWorker, changed

from quintet.executor.backends.registry import make_worker
from quintet.executor.interface import StepWorker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

__all__ = ["serve"]

NUM_DRAWN = 128
PROMPT_LENGTHS = (7, 16, 33, 64)
VOCAB = 512
LEAST_MATCH = 95.0

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 64,
}
SMALLER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}

BF16_FAMILIES: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": lambda **shape: transformers.MistralConfig(**shape, sliding_window=48),
}


@pytest.mark.parametrize("serve", [16], indirect=True)  # blocks that the kernels of a device take
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_tokens_equal_transformers(family: str, serve: Callable[..., Any], device_name: str) -> None:
    served = serve(FAMILIES[family](), max_model_len=96)
    prompts = prompts_of()
    expected = served.greedy(prompts, NUM_TOKENS)
    config = changed(served.config, max_num_batched_tokens=17)
    config = msgspec.structs.replace(
        config, executor=msgspec.structs.replace(config.executor, device=device_name)
    )
    driver = CoreAndWorker(config, make_worker(config))
    for i, prompt in enumerate(prompts):
        driver.admit(i + 1, prompt, GREEDY)
    driver.run()
    assert [driver.outputs[i + 1] for i in range(len(prompts))] == expected


class Pair:
    """One random checkpoint in bf16: transformers' model on the device, and the engine that loaded it."""

    def __init__(self, family: str, folder: Path, device_name: str) -> None:
        shape = SHAPE if device_name == "cuda" else SHAPE | SMALLER
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(BF16_FAMILIES[family](**shape)).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # far from uniform, biases and norms too
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        model = model.to(torch.bfloat16)
        model.save_pretrained(folder)
        self.reference: Any = model.to(device_name)
        hf_config = json.loads((folder / "config.json").read_bytes())
        config = engine_config(folder, hf_config, BLOCK_SIZE, 256, "bfloat16", device=device_name)
        self.config: EngineConfig = with_scheduler(with_blocks(config, 64 * 16), max_num_seqs=64)
        self.worker: StepWorker = ready_worker(self.config)

    def continuations(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the greedy continuations of transformers; prompts of one length form a batch, without padding."""
        drawn: dict[int, list[int]] = {}
        for length in {len(prompt) for prompt in prompts}:
            which = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[i] for i in which], device=self.reference.device)
            with torch.inference_mode():
                out = self.reference.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NUM_DRAWN,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            drawn |= dict(zip(which, out[:, length:].tolist(), strict=True))
        return [drawn[i] for i in range(len(prompts))]

    def ask(self, prompts: list[list[int]], params: SamplingParams) -> InProcessEngine:
        """Run all prompts, numbered from 1; return the engine."""
        engine = InProcessEngine(self.config, self.worker)
        for number, prompt in enumerate(prompts, 1):
            engine.admit(number, prompt, params)
        engine.run()
        return engine


@pytest.mark.parametrize("family", BF16_FAMILIES)
def test_bf16_tokens_match_transformers(
    family: str, tmp_path: Path, device_name: str, report: Report
) -> None:
    pair = Pair(family, tmp_path, device_name)
    draw = random.Random(0)
    prompts = [
        [draw.randrange(VOCAB) for _ in range(length)]
        for length in PROMPT_LENGTHS
        for _ in range(16 if device_name == "cuda" else 2)
    ]
    expected = pair.continuations(prompts)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_DRAWN, ignore_eos=True)
    generated = pair.ask(prompts, greedy).outputs
    shares = [
        share_in_decode([generated[i] for i in range(1, len(prompts) + 1)], expected),
        share_in_prompts(pair, prompts, expected),
    ]
    for what, share in zip(("decoding", "prompts"), shares, strict=True):
        report.figure(Figure(f"{family}, bf16: same token, {what}", share, "%", LEAST_MATCH))
    report.figure(
        Figure(f"{family}, bf16: mean KL from transformers", divergence(pair, prompts, expected), "nats")
    )
    own = bf16_self_agreement(pair, prompts, expected)
    report.figure(Figure(f"{family}: same token, transformers in bf16 and in fp32, prompts", own, "%"))
    assert min(shares) >= LEAST_MATCH


def share_in_decode(generated: list[list[int]], expected: list[list[int]]) -> float:
    """Return the percentage of compared positions with the same token."""
    same = compared = 0
    for ours, theirs in zip(generated, expected, strict=True):
        assert len(ours) == len(theirs) == NUM_DRAWN
        first_other = next((i for i in range(NUM_DRAWN) if ours[i] != theirs[i]), NUM_DRAWN)
        same += first_other
        compared += min(first_other + 1, NUM_DRAWN)
    return 100 * same / compared


def share_in_prompts(pair: Pair, prompts: list[list[int]], expected: list[list[int]]) -> float:
    """Return the percentage of transformers' tokens that are the engine's most likely ones, given the text before them."""
    whole = [prompt + drawn for prompt, drawn in zip(prompts, expected, strict=True)]
    engine = pair.ask(whole, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    ranks = [
        np.concatenate([np.frombuffer(each.ranks, np.int32) for each in engine.prompt_logprobs[number]])
        for number in range(1, len(whole) + 1)
    ]
    return 100 * float(np.mean([(rank[-NUM_DRAWN:] == 1).mean() for rank in ranks]))


def bf16_self_agreement(pair: Pair, prompts: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of transformers' bf16 tokens that equal its fp32 tokens: the cost of bf16 itself."""
    wide = copy.deepcopy(pair.reference).float()
    same = []
    for prompt, drawn in zip(prompts, expected, strict=True):
        with torch.inference_mode():
            logits = wide(torch.tensor([prompt + drawn], device=wide.device)).logits[0]
        most_likely = logits[len(prompt) - 1 : -1].argmax(-1).cpu()
        same.append((most_likely == torch.tensor(drawn)).float().mean().item())
    return 100 * float(np.mean(same))


def divergence(pair: Pair, prompts: list[list[int]], expected: list[list[int]]) -> float:
    """Return the mean over positions of KL(transformers

    engine), over the whole vocabulary, for four texts.
    """
    which = range(0, len(prompts), max(1, len(prompts) // 4))
    whole = [prompts[i] + expected[i] for i in which]
    engine = pair.ask(whole, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=VOCAB))
    found = []
    for number, text in enumerate(whole, 1):
        ours = np.full((len(text) - 1, VOCAB), np.nan, np.float32)
        for part in engine.prompt_logprobs[number]:
            ids = np.frombuffer(part.token_ids, np.int32).reshape(-1, part.width)
            values = np.frombuffer(part.logprobs, np.float32).reshape(-1, part.width)
            at = np.arange(part.first - 1, part.first - 1 + len(ids))
            ours[at[:, None], ids] = values
        assert not np.isnan(ours).any(), "a token of the vocabulary was not reported"
        with torch.inference_mode():
            whole_text = torch.tensor([text], device=pair.reference.device)
            theirs = torch.log_softmax(pair.reference(whole_text).logits[0, :-1].float(), -1).cpu()
        gap = theirs.exp() * (theirs - torch.from_numpy(ours))
        found.append(gap.sum(-1).mean().item())
    return float(np.mean(found))
