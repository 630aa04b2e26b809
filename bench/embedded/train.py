"""Train the embedded model and its draft model on this Python installation's standard library.

Tokenizer, shapes and exported files. Corpus, batches and initial weights depend on ``--seed`` only; the last bits of the weights
also depend on the machine's matrix kernels.
"""

import argparse
import datetime
import json
import logging
import math
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TokenizersBackend,
)

from bench.embedded.corpus import IM_END, IM_START, Document, Kind, build_corpus
from bench.embedded.fit import Schedule, Tokens, fit, predictions

logger = logging.getLogger("train")

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END, PAD]
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048

REPEATS = {Kind.LIBRARY: 2, Kind.PROSE: 2, Kind.CHAT: 2, Kind.TEST: 1}
"""Repetitions of a document in an epoch."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SAMPLE_PROMPTS = ("def fibonacci(n):", "import os\n\nclass ", "for i in range(")
NUM_SAMPLE_TOKENS = 64
SAMPLE_QUESTIONS = ("What does json.dumps do?", "Write a function named fibonacci.")


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a Llama, and the maximum size of its safetensors file."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_file_bytes: int

    def config(self) -> LlamaConfig:
        """Return the configuration of transformers."""
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
        )


SHAPES = {
    "default": Shape(256, 4, 4, 2, 64, 640, max_file_bytes=8_000_000),
    "draft": Shape(96, 1, 2, 1, 48, 192, max_file_bytes=1_000_000),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Mean loss over held-out text: per token, and per byte to compare tokenizers."""

    nats_per_token: float
    bits_per_byte: float


def train_tokenizer(documents: list[Document]) -> TokenizersBackend:
    """Train a byte-level BPE on the documents that are not held out, without repetitions."""
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
    fast = TokenizersBackend(
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


def encode(tokenizer: TokenizersBackend, documents: list[Document]) -> list[Tokens]:
    """Return the tokens of each document after an end-of-text token."""
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)
    encodings = tokenizer.backend_tokenizer.encode_batch([document.text for document in documents])
    return [np.array([end_of_text, *encoding.ids], dtype=np.uint16) for encoding in encodings]


def held_out_loss(model: LlamaForCausalLM, tokenizer: TokenizersBackend, documents: list[Document]) -> Loss:
    """Return the loss over documents, in windows of `CONTEXT` tokens."""
    nats, num_tokens = 0.0, 0
    for tokens in encode(tokenizer, documents):
        for logits, targets in predictions(model, tokens):
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
            num_tokens += len(targets)
    num_bytes = sum(len(document.text.encode()) for document in documents)
    return Loss(nats / num_tokens, nats / num_bytes / math.log(2))


def agreement(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, tokenizer: TokenizersBackend, documents: list[Document]
) -> float:
    """Return the share of held-out positions with equal greedy tokens of both models."""
    num_equal, num_tokens = 0, 0
    for tokens in encode(tokenizer, documents):
        for (guess, _), (verdict, _) in zip(
            predictions(draft, tokens), predictions(target, tokens), strict=True
        ):
            num_equal += int((guess.argmax(-1) == verdict.argmax(-1)).sum())
            num_tokens += len(guess)
    return num_equal / num_tokens


def samples(folder: Path, tokenizer: TokenizersBackend) -> dict[str, str]:
    """Load the exported model; return its greedy outputs for a few fixed prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in SAMPLE_QUESTIONS
    ]
    answers: dict[str, str] = {}
    for prompt in (*SAMPLE_PROMPTS, *map(str, chats)):
        ids = torch.tensor([tokenizer.backend_tokenizer.encode(prompt).ids])
        output = model.generate(  # type: ignore[misc]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_SAMPLE_TOKENS, do_sample=False
        )
        answers[prompt] = str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def export(model: LlamaForCausalLM, tokenizer: TokenizersBackend, folder: Path, limit: int) -> int:
    """Write model and tokenizer as Hugging Face files in bfloat16; return the size of the weights, at most ``limit`` bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shipped = LlamaForCausalLM(model.config)
    shipped.load_state_dict(model.state_dict())
    shipped.bfloat16()
    shipped.generation_config = GenerationConfig(
        bos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        eos_token_id=[SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)],
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        do_sample=True,
        temperature=0.7,
    )
    shipped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)  # safetensors writes 0600
    size = weights.stat().st_size
    if size > limit:
        raise SystemExit(
            f"{folder}: the weights take {size} bytes, more than the {limit} allowed for this shape"
        )
    return size


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=HelpFormatter, prog="python -m bench.embedded.train"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("deploy/embedded"), help="folder for default/, draft/"
    )
    parser.add_argument("--steps", type=int, default=2000, help="steps of the main model's cosine schedule")
    parser.add_argument("--long-steps", type=int, default=308, help="its steps with long windows afterwards")
    parser.add_argument(
        "--draft-steps", type=int, default=1000, help="steps of the draft model's cosine schedule"
    )
    parser.add_argument(
        "--draft-long-steps", type=int, default=120, help="its steps with long windows afterwards"
    )
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a step")
    parser.add_argument(
        "--peak-matrices", type=float, default=0.01, help="highest learning rate of the layers' matrices"
    )
    parser.add_argument(
        "--peak-embedding", type=float, default=0.008, help="highest learning rate of other weights"
    )
    parser.add_argument("--seed", type=int, default=5, help="seed of chats, batches and initial weights")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    parser.add_argument("--checkpoint", type=Path, default=None, help="folder for resumable checkpoints")
    return parser.parse_args()


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults; keep the description's lines."""


def main() -> None:
    """Train the tokenizer and both models; write them, each with its ``TRAINING.json``."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    documents = build_corpus(arguments.seed)
    tokenizer = train_tokenizer(documents)
    shown = [
        document for document in documents if not document.held_out for _ in range(REPEATS[document.kind])
    ]
    held_out = [document for document in documents if document.held_out and document.kind is Kind.LIBRARY]
    encoded = encode(tokenizer, shown)
    num_tokens = sum(map(len, encoded))
    logger.info("%d documents, %d tokens an epoch", len(documents), num_tokens)
    trained: dict[str, LlamaForCausalLM] = {}
    for name, num_cosine_steps, num_long_steps in (
        ("default", arguments.steps, arguments.long_steps),
        ("draft", arguments.draft_steps, arguments.draft_long_steps),
    ):
        schedule = Schedule(
            num_cosine_steps,
            num_long_steps,
            arguments.batch_tokens,
            arguments.peak_matrices,
            arguments.peak_embedding,
        )
        torch.manual_seed(arguments.seed)
        model = trained[name] = LlamaForCausalLM(SHAPES[name].config())
        fit(
            model,
            encoded,
            schedule,
            arguments.seed,
            arguments.checkpoint / f"{name}.pt" if arguments.checkpoint else None,
        )
        loss = held_out_loss(model, tokenizer, held_out)
        folder = arguments.output / name
        record = {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seed": arguments.seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "weights_bytes": export(model, tokenizer, folder, SHAPES[name].max_file_bytes),
            "steps": schedule.num_steps,
            "tokens_seen": schedule.num_steps * arguments.batch_tokens,
            "tokens_in_an_epoch": num_tokens,
            "held_out": {
                "what": "library files kept from model and tokenizer",
                "files": [document.name for document in held_out],
                "nats_per_token": round(loss.nats_per_token, 4),
                "bits_per_byte": round(loss.bits_per_byte, 4),
            },
            "greedy_agreement_with_default": round(
                agreement(model, trained["default"], tokenizer, held_out), 4
            ),
            "greedy_samples": samples(folder, tokenizer),
        }
        (folder / "TRAINING.json").write_text(json.dumps(record, indent=1) + "\n")
        logger.info("%s", json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
