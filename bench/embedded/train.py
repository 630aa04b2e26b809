"""Train the model that ships with the package, and its draft, from nothing but this Python installation.

Owns the tokenizer, the two shapes, the optimisation and the files it writes. What the text is, `corpus` knows.
One command, one seed: the corpus, its order, the batches and the initial weights follow from `--seed`; the last bits of
the weights also depend on the machine's matrix kernels.
"""

import argparse
import datetime
import json
import logging
import math
import os
import platform
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from bench.embedded.corpus import IM_END, IM_START, Document, Kind, build_corpus

logger = logging.getLogger("train")

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END, PAD]
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
CONTEXT = 512
LONG_CONTEXT = 2048
LONG_CONTEXT_SHARE = 0.1

# How often one pass shows a document: the library is what the model should sound like, the tests only add breadth.
REPEATS = {Kind.LIBRARY: 2, Kind.PROSE: 2, Kind.CHAT: 2, Kind.TEST: 1}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SAMPLE_PROMPTS = ("def fibonacci(n):", "import os\n\nclass ", "for i in range(")
SAMPLE_CHAT = "What does json.dumps do?"


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of one Llama and how many bytes its safetensors file may take."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_file_bytes: int

    def config(self) -> LlamaConfig:
        """Return the Hugging Face configuration that both shipped folders share but for the sizes."""
        return LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
            eos_token_id=SPECIAL_TOKENS.index(IM_END),
            pad_token_id=SPECIAL_TOKENS.index(PAD),
            attn_implementation="sdpa",
        )


SHAPES = {
    "default": Shape(256, 4, 4, 2, 64, 640, max_file_bytes=8_000_000),
    "draft": Shape(96, 1, 2, 1, 48, 192, max_file_bytes=1_000_000),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """A mean over held-out text, in the two units that compare: across checkpoints, and across tokenizers."""

    nats_per_token: float
    bits_per_byte: float


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE on the documents that are not held out, each seen once."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents if not document.held_out), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> list[NDArray[np.uint16]]:
    """Turn each document into its tokens, an end-of-text token first."""
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)
    encodings = tokenizer.backend_tokenizer.encode_batch([document.text for document in documents])
    return [np.array([end_of_text, *encoding.ids], dtype=np.uint16) for encoding in encodings]


def windows(
    encoded: list[NDArray[np.uint16]], context: int, batch_tokens: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Yield batches [batch_tokens // context, context + 1] for ever: documents shuffled, joined, cut, shuffled again."""
    rng = np.random.default_rng(seed)
    batch_size = batch_tokens // context
    while True:
        stream = np.concatenate([encoded[index] for index in rng.permutation(len(encoded))])
        starts = np.arange(int(rng.integers(context)), len(stream) - context - 1, context)
        rng.shuffle(starts)
        for batch in starts[: len(starts) // batch_size * batch_size].reshape(-1, batch_size):
            yield np.stack([stream[start : start + context + 1] for start in batch]).astype(np.int64)


def next_token_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats of a batch [batch, context + 1], computed in bfloat16 where that is safe."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits  # [batch, context, vocab]
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def learning_rate(step: int, num_steps: int, peak: float, warmup: int = 100) -> float:
    """Return the rate of a step: a linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_of(model: LlamaForCausalLM, peak: float) -> torch.optim.AdamW:
    """Build AdamW that decays matrices and leaves norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def train_model(
    model: LlamaForCausalLM,
    encoded: list[NDArray[np.uint16]],
    *,
    num_steps: int,
    batch_tokens: int,
    peak: float,
    seed: int,
    checkpoint: Path | None,
    checkpoint_seconds: float,
) -> None:
    """Fit `model` in place for `num_steps`, resuming from `checkpoint` where that file exists."""
    optimizer = optimizer_of(model, peak)
    first_step = 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    num_long_steps = round(num_steps * LONG_CONTEXT_SHARE)
    short = windows(encoded, CONTEXT, batch_tokens, seed)
    long = windows(encoded, LONG_CONTEXT, batch_tokens, seed + 1)
    compiled = torch.compile(model)
    model.train()
    saved_at = time.monotonic()
    mean_loss = math.log(VOCAB_SIZE)
    with tqdm(total=num_steps, unit="step", mininterval=1) as bar:
        for step in range(num_steps):
            batch = next(long if step >= num_steps - num_long_steps else short)
            bar.update()
            if step < first_step:
                continue
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, num_steps, peak)
            loss = next_token_loss(compiled, torch.from_numpy(batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mean_loss += 0.02 * (loss.item() - mean_loss)
            bar.set_postfix(loss=f"{mean_loss:.3f}", refresh=False)
            if checkpoint is not None and time.monotonic() - saved_at > checkpoint_seconds:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, checkpoint.with_suffix(".new"))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)
                saved_at = time.monotonic()


@torch.inference_mode()
def held_out_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: list[Document]
) -> Loss:
    """Return the loss over held-out library files, read in windows of `CONTEXT` tokens."""
    texts = [document for document in documents if document.held_out and document.kind is Kind.LIBRARY]
    nats, num_tokens = 0.0, 0
    model.eval()
    for ids in encode(tokenizer, texts):
        for start in range(0, len(ids) - 1, CONTEXT):
            window = torch.from_numpy(ids[start : start + CONTEXT + 1].astype(np.int64))[None]
            predicted = window.shape[1] - 1
            if predicted:
                nats += next_token_loss(model, window).item() * predicted
                num_tokens += predicted
    num_bytes = sum(len(document.text.encode()) for document in texts)
    return Loss(nats / num_tokens, nats / num_bytes / math.log(2))


@torch.inference_mode()
def samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Return what the model says, greedily, to a few fixed prompts."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": SAMPLE_CHAT}], add_generation_prompt=True, tokenize=False
    )
    answers: dict[str, str] = {}
    for prompt in (*SAMPLE_PROMPTS, str(chat)):
        ids = torch.tensor([tokenizer.backend_tokenizer.encode(prompt).ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        answers[prompt] = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return answers


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, limit: int) -> int:
    """Write model and tokenizer as Hugging Face files in bfloat16; return the weights' bytes, at most `limit`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shipped = LlamaForCausalLM(model.config).to(torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    shipped.generation_config.update(
        bos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        eos_token_id=[SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)],
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        do_sample=True,
        temperature=0.7,
    )
    shipped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = (folder / "model.safetensors").stat().st_size
    if size > limit:
        raise SystemExit(
            f"{folder}: the weights take {size} bytes, more than the {limit} allowed for this shape"
        )
    AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    return size


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        prog="python -m bench.embedded.train",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("deploy/embedded"), help="folder for default/ and draft/"
    )
    parser.add_argument(
        "--models", nargs="+", choices=sorted(SHAPES), default=["default", "draft"], help="which to train"
    )
    parser.add_argument("--steps", type=int, default=2400, help="optimiser steps of the main model")
    parser.add_argument("--draft-steps", type=int, default=1200, help="optimiser steps of the draft model")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens a step learns from")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=5, help="decides batches and initial weights")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    parser.add_argument("--checkpoint", type=Path, default=None, help="folder for resumable checkpoints")
    return parser.parse_args()


def main() -> None:
    """Train the tokenizer and both models, write them, and record what came out beside them."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    documents = build_corpus(arguments.seed)
    tokenizer = train_tokenizer(documents)
    shown = [
        document for document in documents if not document.held_out for _ in range(REPEATS[document.kind])
    ]
    encoded = encode(tokenizer, shown)
    logger.info("%d documents, %d tokens an epoch", len(documents), sum(map(len, encoded)))
    for name in arguments.models:
        shape = SHAPES[name]
        num_steps = arguments.steps if name == "default" else arguments.draft_steps
        random.seed(arguments.seed)
        torch.manual_seed(arguments.seed)
        model = LlamaForCausalLM(shape.config())
        started = time.monotonic()
        train_model(
            model,
            encoded,
            num_steps=num_steps,
            batch_tokens=arguments.batch_tokens,
            peak=arguments.peak,
            seed=arguments.seed,
            checkpoint=arguments.checkpoint / f"{name}.pt" if arguments.checkpoint else None,
            checkpoint_seconds=300,
        )
        seconds = time.monotonic() - started
        loss = held_out_loss(model, tokenizer, documents)
        folder = arguments.output / name
        record = {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seed": arguments.seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "weights_bytes": export(model, tokenizer, folder, shape.max_file_bytes),
            "steps": num_steps,
            "tokens_seen": num_steps * arguments.batch_tokens,
            "training_seconds": round(seconds),
            "held_out": {
                "what": "library files kept from model and tokenizer",
                "nats_per_token": round(loss.nats_per_token, 4),
                "bits_per_byte": round(loss.bits_per_byte, 4),
            },
            "greedy_samples": samples(model, tokenizer),
        }
        (folder / "TRAINING.json").write_text(json.dumps(record, indent=1) + "\n")
        logger.info("%s", json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
