"""A byte vocabulary for models without a tokenizer, and structured-output requests among plain ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams
from quintet.wire.structured import StructuredOutputsParams

EOS = 200
PATTERNS = ("[a-f]{2,9}(-[0-9]{3}){1,3}", "(yes|no|perhaps)!", "x( [A-Z][a-z]+){4}")


def with_vocabulary(config: EngineConfig, folder: Path) -> EngineConfig:
    """Write a byte tokenizer, with the printable ASCII characters first, and configure the model with it."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [chr(code) for code in range(33, 127)]
    vocab = {char: at for at, char in enumerate(printable)}
    vocab["Ġ"] = len(vocab)
    vocab |= {char: 300 + at for at, char in enumerate(sorted(set(alphabet) - set(vocab)))}
    vocab["<end>"] = EOS
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    model = msgspec.structs.replace(config.model, tokenizer_path=str(folder), eos_token_ids=[EOS])
    return msgspec.structs.replace(config, model=model)


def requested(num_tokens: int = 40) -> list[SamplingParams]:
    """Return structured-output requests, alone and with other sampling settings; every third is plain."""
    more: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 9, "min_p": 0.001},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 2},
        {"temperature": 0.9, "logprobs": 1},
        {"temperature": 0.8, "presence_penalty": 0.5, "min_tokens": 3},
        {"temperature": 1.0, "top_p": 0.8},
    ]
    return [
        SamplingParams(
            **each,  # type: ignore[arg-type]
            max_tokens=10 if i % 3 == 2 else num_tokens,
            seed=i,
            structured_outputs=None if i % 3 == 2 else form(pattern_of(i)),
        )
        for i, each in enumerate(more)
    ]


def pattern_of(number: int) -> str:
    """Return the pattern of this request's output, or None."""
    return PATTERNS[number % len(PATTERNS)]


def form(pattern: str) -> StructuredOutputsParams:
    """Return the pattern as the tokenizer process sends it."""
    return StructuredOutputsParams(compiled=LLMatcher.grammar_from_regex(pattern))


def check(outputs: Mapping[int, list[int]]) -> None:
    """Raise unless the output of every structured request, by its number, matches and ends when complete."""
    for number, tokens in outputs.items():
        if number % 3 != 2:
            text = "".join(chr(33 + token) if token < 94 else " " for token in tokens[:-1])
            assert tokens[-1] == EOS and re.fullmatch(pattern_of(number), text), (number, text, tokens)
